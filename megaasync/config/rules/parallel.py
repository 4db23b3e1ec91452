"""Rules of the layout: every layer, expert and batch can be split as asked for."""

import math

from megaasync.config.schema import Config, ConfigError
from megaasync.schedules import SCHEDULES


def check_layout(config: Config) -> None:
    """The layout can be built, and every stage has a layer."""
    parallel = config.parallel
    per_rank = parallel.virtual_stages or SCHEDULES[config.schedule.name].virtual_stages[0]
    stages, layers = parallel.pipeline * per_rank, config.model.num_layers
    if stages > layers:
        made_of = "" if per_rank == 1 else f" x {per_rank} stages per rank = {stages}"
        raise ConfigError(
            f"parallel.pipeline={parallel.pipeline}: more stages{made_of} than model.num_layers={layers}; set "
            + (
                f"parallel.pipeline to at most {layers // per_rank}"
                if layers >= per_rank
                else f"model.num_layers={per_rank} or more"
            )
        )
    per_stage = parallel.layers_per_stage
    if per_stage is not None and (len(per_stage) != stages or sum(per_stage) != layers or min(per_stage) < 1):
        raise ConfigError(
            f"parallel.layers_per_stage={list(per_stage)}: must be {stages} numbers of at least 1 that sum to "
            f"model.num_layers={layers}; set null to have the layers assigned"
        )


def check_tensor(config: Config) -> None:
    """Every layer can be split over the tensor-parallel ranks."""
    size, model = config.parallel.tensor, config.model
    if size == 1:
        if config.parallel.sequence_parallel:
            raise ConfigError(
                "parallel.sequence_parallel=true: there is no other rank to share a sequence with; set parallel.tensor "
                "to 2 or more, or parallel.sequence_parallel=false"
            )
        return
    split = {"num_heads": model.num_heads, "num_kv_heads": model.num_kv_heads}
    if config.parallel.sequence_parallel or model.moe is not None:
        split["seq_length"] = model.seq_length
    if model.moe is None or model.moe.first_dense_layers:
        split["ffn_hidden_size"] = model.ffn_hidden_size
    if model.moe is not None and model.moe.num_shared_experts:
        split["moe.ffn_hidden_size x num_shared_experts"] = model.moe.ffn_hidden_size * model.moe.num_shared_experts
    for name, length in split.items():
        if length % size:
            raise ConfigError(
                f"parallel.tensor={size}: must divide model.{name}={length}, which each rank has an equal part of; "
                f"set parallel.tensor={math.gcd(size, length)}"
            )
    if size > model.vocab_size:
        raise ConfigError(f"parallel.tensor={size}: more ranks than model.vocab_size={model.vocab_size} rows")


def check_expert_parallel(config: Config) -> None:
    """Experts can be spread evenly."""
    size, moe = config.parallel.expert, config.model.moe
    if moe is not None and moe.num_experts % size:
        raise ConfigError(
            f"parallel.expert={size}: must divide model.moe.num_experts={moe.num_experts}, of which each rank has an "
            f"equal part; set parallel.expert={math.gcd(size, moe.num_experts)}"
        )


def check_batch(config: Config) -> None:
    """The batch divides into microbatches."""
    train = config.train
    unit = train.micro_batch_size * config.data_ranks
    if train.global_batch_size % unit:
        near = max(round(train.global_batch_size / unit), 1) * unit
        raise ConfigError(
            f"train.global_batch_size={train.global_batch_size}: must be a multiple of micro_batch_size x data x "
            f"expert = {train.micro_batch_size} x {config.data_ranks} = {unit}; set train.global_batch_size={near}"
        )
