"""Rules that one field alone cannot show, one short named function each; all run before anything is started."""

import math
import re
from collections.abc import Callable
from dataclasses import fields
from pathlib import PurePath

from megaasync.config.pipeline import phases_of
from megaasync.config.schema import Config, ConfigError, DockerCluster, SlurmCluster
from megaasync.schedules import SCHEDULES, ScheduleError

# 256 byte pieces, three control pieces, and a few letters: below this a byte-fallback tokenizer cannot be trained.
SMALLEST_TRAINED_VOCABULARY = 400


def _at_least(key: str, value: int | float | None, smallest: int | float) -> None:
    if value is not None and value < smallest:
        raise ConfigError(f"{key}={value}: must be at least {smallest}")


def _within(key: str, value: float, low: float, high: float, *, open_end: bool = True) -> None:
    if not (low <= value < high or (not open_end and value == high)):
        bracket = ")" if open_end else "]"
        raise ConfigError(f"{key}={value}: must lie in [{low}, {high}{bracket}")


def check_sizes(config: Config) -> None:
    """Counts are positive."""
    model, train = config.model, config.train
    for name in ("num_layers", "hidden_size", "num_heads", "num_kv_heads", "ffn_hidden_size", "seq_length"):
        _at_least(f"model.{name}", getattr(model, name), 1)
    _at_least("model.vocab_size", model.vocab_size, 2)
    for name in (
        "steps",
        "global_batch_size",
        "micro_batch_size",
        "eval_interval",
        "eval_sequences",
        "loss_chunk_tokens",
        "lr_schedule_steps",
    ):
        _at_least(f"train.{name}", getattr(train, name), 1)
    for name in ("warmup_steps", "decay_steps", "seed", "max_skipped"):
        _at_least(f"train.{name}", getattr(train, name), 0)
    for name in ("tensor", "expert", "pipeline"):
        _at_least(f"parallel.{name}", getattr(config.parallel, name), 1)
    if config.parallel.data != "auto":
        _at_least("parallel.data", config.parallel.data, 1)
    for name in ("init_std", "norm_eps", "rope_theta"):
        if getattr(model, name) <= 0:
            raise ConfigError(f"model.{name}={getattr(model, name)}: must be above 0")
    _at_least("logging.interval", config.logging.interval, 1)
    _at_least("checkpoint.interval", config.checkpoint.interval, 1)
    _at_least("checkpoint.keep", config.checkpoint.keep, 1)
    if config.logging.spike_threshold is not None and config.logging.spike_threshold <= 0:
        raise ConfigError(f"logging.spike_threshold={config.logging.spike_threshold:g}: must be above 0, or null")
    _at_least("run.max_restarts", config.run.max_restarts, 0)
    if config.run.max_restarts and config.checkpoint.interval is None:
        raise ConfigError(
            f"run.max_restarts={config.run.max_restarts}: a restart goes on from a checkpoint, but "
            "checkpoint.interval=null makes none; set checkpoint.interval"
        )
    if train.time_limit is not None and train.time_limit <= 0:
        raise ConfigError(f"train.time_limit={train.time_limit:g}: must be above 0 seconds, or null")


def check_attention(config: Config) -> None:
    """Heads divide the width, and key-value heads divide the heads."""
    model = config.model
    if model.hidden_size % model.num_heads:
        raise ConfigError(
            f"model.num_heads={model.num_heads}: must divide model.hidden_size={model.hidden_size}; "
            f"{model.hidden_size} / {model.num_heads} is not whole"
        )
    if (model.hidden_size // model.num_heads) % 2:
        raise ConfigError(
            f"model.num_heads={model.num_heads}: the head size {model.hidden_size // model.num_heads} "
            "(model.hidden_size / model.num_heads) must be even for rotary positions"
        )
    if model.num_heads % model.num_kv_heads:
        raise ConfigError(
            f"model.num_kv_heads={model.num_kv_heads}: must divide model.num_heads={model.num_heads}; "
            "several query heads share one key-value head"
        )


def check_experts(config: Config) -> None:
    """The router can choose top_k experts."""
    moe = config.model.moe
    if moe is None:
        return
    for name in ("num_experts", "top_k", "ffn_hidden_size"):
        _at_least(f"model.moe.{name}", getattr(moe, name), 1)
    for name in (
        "num_shared_experts",
        "first_dense_layers",
        "bias_update_rate",
        "sequence_balance_loss",
        "global_balance_loss",
        "z_loss",
    ):
        _at_least(f"model.moe.{name}", getattr(moe, name), 0)
    if moe.capacity_factor is not None and moe.capacity_factor <= 0:
        raise ConfigError(
            f"model.moe.capacity_factor={moe.capacity_factor}: must be above 0; set null to drop no token"
        )
    if moe.top_k > moe.num_experts:
        raise ConfigError(
            f"model.moe.top_k={moe.top_k}: must be at most model.moe.num_experts={moe.num_experts}; "
            "a token cannot go to more experts than there are"
        )
    if moe.first_dense_layers > config.model.num_layers:
        raise ConfigError(
            f"model.moe.first_dense_layers={moe.first_dense_layers}: must be at most "
            f"model.num_layers={config.model.num_layers}"
        )


def check_layout(config: Config) -> None:
    """The layout can be built, and every stage has a layer."""
    parallel = config.parallel
    if parallel.virtual_stages is not None:
        _at_least("parallel.virtual_stages", parallel.virtual_stages, 1)
    if parallel.timeout_seconds <= 0:
        raise ConfigError(f"parallel.timeout_seconds={parallel.timeout_seconds:g}: must be above 0")
    per_rank = parallel.virtual_stages or SCHEDULES[config.schedule.name].chunks[0]
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
    dealt = parallel.layers_per_stage
    if dealt is not None and (len(dealt) != stages or sum(dealt) != layers or min(dealt) < 1):
        raise ConfigError(
            f"parallel.layers_per_stage={list(dealt)}: must be {stages} numbers of at least 1 that sum to "
            f"model.num_layers={layers}; set null to have the layers dealt"
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


def check_kernels(config: Config) -> None:
    """The backend can do what is asked of it."""
    train, model = config.train, config.model
    if config.kernels == "te" and train.dtype == "float64":
        raise ConfigError("kernels=te: Transformer Engine has no float64; set train.dtype=bfloat16 or kernels=torch")
    if config.kernels == "te" and config.device == "cpu":
        raise ConfigError("kernels=te: Transformer Engine needs a GPU, but device=cpu; set kernels=torch")
    if train.fp8 == "none":
        return
    if config.kernels != "te" or train.dtype != "bfloat16":
        raise ConfigError(
            f"train.fp8={train.fp8}: only Transformer Engine has it, beside bfloat16, but kernels={config.kernels} and "
            f"train.dtype={train.dtype}; set kernels=te train.dtype=bfloat16, or train.fp8=none"
        )
    ranks, moe, head_size = config.parallel.tensor, model.moe, model.hidden_size // model.num_heads
    block = 32 if train.fp8 == "mxfp8" else 16
    widths = {
        "model.hidden_size": model.hidden_size,
        "model.hidden_size / parallel.tensor": model.hidden_size // ranks,
        "head size x model.num_kv_heads / parallel.tensor": head_size * model.num_kv_heads // ranks,
    }
    if moe is None or moe.first_dense_layers:
        widths["model.ffn_hidden_size / parallel.tensor"] = model.ffn_hidden_size // ranks
    if moe is not None:
        widths["model.moe.ffn_hidden_size"] = moe.ffn_hidden_size
        widths["model.moe.ffn_hidden_size x num_shared_experts / parallel.tensor"] = (
            moe.ffn_hidden_size * moe.num_shared_experts // ranks
        )
    for name, width in widths.items():
        if width % block:
            raise ConfigError(
                f"train.fp8={train.fp8}: matrices must be multiples of {block} wide on each rank, but {name} is "
                f"{width}; change it, or set train.fp8=none"
            )
    tokens = train.micro_batch_size * model.seq_length
    if tokens % block:
        raise ConfigError(
            f"train.fp8={train.fp8}: a microbatch must have a multiple of {block} tokens, but train.micro_batch_size x "
            f"model.seq_length is {tokens}; change one of them, or set train.fp8=none"
        )


def check_documents(config: Config) -> None:
    """There are documents to attend within."""
    if config.train.document_mask and config.data.name == "synthetic":
        raise ConfigError(
            "train.document_mask=true: data=synthetic has no documents; set train.document_mask=false or other data"
        )


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


def check_schedule(config: Config) -> None:
    """The schedule is defined for these sizes, and a correction has a delay to correct."""
    schedule = config.schedule
    for name in ("sync_start_steps", "sync_cooldown_steps", "extra_in_flight"):
        _at_least(f"schedule.{name}", getattr(schedule, name), 0)
    try:
        phases_of(config)
    except ScheduleError as error:
        raise ConfigError(f"schedule={schedule.name}: {error}{_schedule_remedy(config, error)}") from None
    if config.correction.name != "none" and not SCHEDULES[schedule.name].has_delay:
        raise ConfigError(
            f"correction={config.correction.name}: corrects a gradient delay, but schedule={schedule.name} has none; "
            "set correction=none or schedule=2bw"
        )


def check_checkpoints(config: Config) -> None:
    """The state can be named: a tied embedding must be the same on both of its stages."""
    delays = {delay for phase in phases_of(config) for delay in (phase.schedule.delay,) if len(set(delay)) > 1}
    if config.checkpoint.interval is not None and config.model.tie_embeddings and delays:
        raise ConfigError(
            f"checkpoint.interval={config.checkpoint.interval}: under schedule={config.schedule.name} the copies of a "
            "tied embedding are of different versions; set checkpoint.interval=null or model.tie_embeddings=false"
        )


def _schedule_remedy(config: Config, error: ScheduleError) -> str:
    """Which key to change, as far as the error says what is wrong."""
    if error.remedy:
        return f"; set {error.remedy}"
    if error.wanted_microbatches is None:
        return ""
    train, wanted = config.train, error.wanted_microbatches
    here = (
        f"; here m = {config.num_microbatches} = train.global_batch_size={train.global_batch_size} / "
        f"(train.micro_batch_size={train.micro_batch_size} x data x expert = {config.data_ranks}); set "
    )
    if wanted < config.num_microbatches:
        return f"{here}train.micro_batch_size={train.global_batch_size // (config.data_ranks * wanted)}"
    size = wanted * train.micro_batch_size * config.data_ranks
    return f"{here}train.global_batch_size={size}, a smaller train.micro_batch_size, or fewer stages"


def check_optimizer(config: Config) -> None:
    """Rates and moments lie where the rules are defined."""
    optimizer = config.optimizer
    _at_least("optimizer.lr", optimizer.lr, 0)
    _at_least("optimizer.weight_decay", optimizer.weight_decay, 0)
    for name in ("betas", "adamw_betas"):
        for i, beta in enumerate(getattr(optimizer, name, ())):
            _within(f"optimizer.{name}[{i}]", beta, 0, 1)
    for name in ("momentum", "beta2"):
        if hasattr(optimizer, name):
            _within(f"optimizer.{name}", getattr(optimizer, name), 0, 1)
    for name in ("gamma", "momentum_decay"):
        if hasattr(optimizer, name):
            _at_least(f"optimizer.{name}", getattr(optimizer, name), 0)
    if hasattr(optimizer, "eps") and optimizer.eps <= 0:
        raise ConfigError(f"optimizer.eps={optimizer.eps}: must be above 0")
    for name in ("newton_schulz_steps", "refresh_interval", "first_basis", "largest_side"):
        if hasattr(optimizer, name):
            _at_least(f"optimizer.{name}", getattr(optimizer, name), 1)
    if config.correction.name == "taylor":
        _at_least("correction.strength", config.correction.strength, 0)
    clip = config.train.clip_grad_norm
    if clip is not None and clip <= 0:
        raise ConfigError(f"train.clip_grad_norm={clip}: must be above 0; set null to switch clipping off")


def check_lr_schedule(config: Config) -> None:
    """The final rate is a share of the peak. Warmup and decay may outlast the run."""
    train = config.train
    _within("train.final_lr_ratio", train.final_lr_ratio, 0, 1, open_end=False)


def check_cluster(config: Config) -> None:
    """The cluster has ranks for the layout."""
    cluster = config.cluster
    for name in ("nodes", "gpus_per_node"):
        _at_least(f"cluster.{name}", getattr(cluster, name), 1)
    for name in ("gpu_memory_gib", "gpu_tflops", "network_gbytes"):
        if getattr(cluster, name) is not None and getattr(cluster, name) <= 0:
            raise ConfigError(f"cluster.{name}={getattr(cluster, name):g}: must be above 0; set null if unknown")
    ranks = cluster.ranks_per_node
    if ranks is not None and cluster.nodes * ranks != config.world_size:
        layout = config.layout
        raise ConfigError(
            f"cluster.nodes={cluster.nodes}: {cluster.nodes} x {ranks} ranks per node, but tensor("
            f"{layout.tensor}) x expert({layout.expert}) x pipeline({layout.pipeline}) x data({layout.data}) = "
            f"{layout.world_size} ranks; set parallel.data=auto or degrees that multiply to the cluster's"
        )
    if isinstance(cluster, SlurmCluster | DockerCluster):
        _check_lines(cluster)
    if isinstance(cluster, SlurmCluster):
        _check_slurm(config, cluster)
    if isinstance(cluster, SlurmCluster | DockerCluster):
        _check_container(cluster)


def _check_slurm(config: Config, cluster: SlurmCluster) -> None:
    if cluster.ranks_per_node is None:
        raise ConfigError(
            "cluster.tasks_per_node=null: with cluster.gpus_per_node=null too nothing says how many ranks a node has; "
            f"set cluster.tasks_per_node={max(config.world_size // cluster.nodes, 1)}"
        )
    if cluster.gpus_per_node is not None and cluster.ranks_per_node > cluster.gpus_per_node:
        raise ConfigError(
            f"cluster.tasks_per_node={cluster.tasks_per_node}: every rank needs a GPU of its own, but "
            f"cluster.gpus_per_node={cluster.gpus_per_node}; set it to null for ranks without GPUs"
        )
    for name in ("tasks_per_node", "cpus_per_task", "gpus_per_task"):
        _at_least(f"cluster.{name}", getattr(cluster, name), 1)
    _at_least("cluster.signal_seconds", cluster.signal_seconds, 1)
    if cluster.gpus_per_task not in (None, 1):
        raise ConfigError(f"cluster.gpus_per_task={cluster.gpus_per_task}: a rank has one GPU; set 1, or null")
    limit = None if cluster.time is None else _limit_of(cluster.time)
    if limit is not None and cluster.signal_seconds > limit / 2:
        raise ConfigError(
            f"cluster.signal_seconds={cluster.signal_seconds}: comes before training does at cluster.time="
            f"{cluster.time}; set at most half of it, {limit // 2}"
        )
    if cluster.requeue and config.checkpoint.interval is None:
        raise ConfigError(
            "cluster.requeue=true: the job goes on from a checkpoint, but checkpoint.interval=null makes none; set "
            "checkpoint.interval, or cluster.requeue=false"
        )
    _check_extra_sbatch(cluster)


_TIME = re.compile(r"\d+|\d+:\d+|\d+:\d+:\d+|\d+-\d+(:\d+){0,2}")
_MOST_MINUTES = (
    7 * 24 * 60
)  # in a bare number; more is a mistake of units, or of a YAML reader that made a number of it


def _limit_of(time: str) -> int | None:
    """Seconds of a time limit as sbatch reads it; None for no limit.

    Raises:
        ConfigError: it is none.
    """
    if time.upper() in ("UNLIMITED", "INFINITE"):
        return None
    forms = (
        "minutes, minutes:seconds, hours:minutes:seconds, days-hours, days-hours:minutes or days-hours:minutes:seconds"
    )
    if not _TIME.fullmatch(time):
        raise ConfigError(f"cluster.time={time}: cannot be read; give {forms}, as in cluster.time=24:00:00")
    if time.isdecimal() and int(time) > _MOST_MINUTES:
        days, hours = int(time) // 1440, int(time) % 1440 // 60
        raise ConfigError(
            f"cluster.time={time}: a bare number is minutes, and these are {int(time) / 1440:.0f} days; if you mean "
            f"that write {days}-{hours:02}:00:00, if you mean seconds write {int(time) // 3600}:"
            f"{int(time) % 3600 // 60:02}:{int(time) % 60:02}"
        )
    return _seconds(time)


# options of sbatch that the script has already, and the key behind each; None where there is no choice
_OWN_OPTIONS: dict[str, str | None] = {
    **{name: name.replace("-", "_") for name in (
        "job-name", "nodes", "gpus-per-node", "gpus-per-task", "gres", "mem", "cpus-per-task", "time", "partition",
        "account", "qos", "constraint", "exclude", "reservation", "comment", "mail-type", "mail-user", "dependency",
        "nice", "wckey", "exclusive", "requeue",
    )},
    "ntasks-per-node": "tasks_per_node", "no-requeue": "requeue", "signal": "signal_seconds",
    "array": None, "chdir": None, "output": None, "open-mode": None, "ntasks": None, "export": None,
}  # fmt: skip
_SHORT_OPTIONS = {
    "J": "job-name", "N": "nodes", "n": "ntasks", "c": "cpus-per-task", "t": "time", "p": "partition", "A": "account",
    "q": "qos", "C": "constraint", "x": "exclude", "d": "dependency", "a": "array", "D": "chdir", "o": "output",
}  # fmt: skip


def _check_extra_sbatch(cluster: SlurmCluster) -> None:
    for line in cluster.extra_sbatch:
        match = re.fullmatch(r"--([a-z][a-z-]*)([= ].*)?|-([A-Za-z])(.*)", line)
        if match is None:
            raise ConfigError(
                f"cluster.extra_sbatch: {line!r} is no option of sbatch; give options as in "
                """'cluster.extra_sbatch=["--switches=1","--mcs-label=x"]'"""
            )
        option = match.group(1) or _SHORT_OPTIONS.get(match.group(3), match.group(3))
        if option in _OWN_OPTIONS:
            key = _OWN_OPTIONS[option]
            remedy = "leave it out, the script needs its own" if key is None else f"set cluster.{key} instead"
            raise ConfigError(f"cluster.extra_sbatch: {line!r} would stand beside the script's --{option}; {remedy}")


def _check_lines(cluster: SlurmCluster | DockerCluster) -> None:
    """Nothing that is written into a script spans lines: the rest of it would be commands."""
    for field in fields(cluster):
        value = getattr(cluster, field.name)
        several = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, tuple) else ()
        for name, text in [("", value), *((f".{name}", one) for name, one in several)]:
            if isinstance(text, str) and ("\n" in text or "\r" in text):
                raise ConfigError(
                    f"cluster.{field.name}{name}={text!r}: holds a line break, which no script of a job can; write "
                    "one line, or several entries of a list"
                )


def _seconds(time: str) -> int:
    """Of a time as sbatch reads it: minutes, minutes:seconds, hours:minutes:seconds, days-hours[:minutes[:seconds]]."""
    days, dash, rest = time.rpartition("-")
    parts = [int(part) for part in rest.split(":")]
    if dash:
        hours, minutes, seconds = (*parts, 0, 0)[:3]
    elif len(parts) == 3:
        hours, minutes, seconds = parts
    else:
        hours, minutes, seconds = 0, parts[0], parts[1] if len(parts) == 2 else 0
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds


def _check_container(cluster: SlurmCluster | DockerCluster) -> None:
    for mount in cluster.mounts:
        if not re.fullmatch(r"[^:,]+:[^:,]+(:[a-z,]+)?", mount):
            raise ConfigError(
                f"cluster.mounts: {mount!r} cannot be read; give host:container, as in "
                """'cluster.mounts=["/data:/data"]'"""
            )
    for name in (*cluster.env, *cluster.secrets):
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            raise ConfigError(f"cluster.env.{name}: is no name of an environment variable; use letters, digits and _")
    if cluster.name == "docker" and cluster.nodes != 1:
        raise ConfigError(f"cluster.nodes={cluster.nodes}: docker runs on this host only; set cluster.nodes=1")


def check_data(config: Config) -> None:
    """Data settings that need no file to judge."""
    data = config.data
    if data.name in ("python_stdlib", "hf"):
        _within("data.validation_fraction", data.validation_fraction, 0, 1)
        _at_least("data.tokenizer_bytes", data.tokenizer_bytes, 1000)
        if (data.name == "python_stdlib" or data.tokenizer is None) and (
            config.model.vocab_size < SMALLEST_TRAINED_VOCABULARY
        ):
            raise ConfigError(
                f"model.vocab_size={config.model.vocab_size}: a tokenizer with byte fallback needs at least "
                f"{SMALLEST_TRAINED_VOCABULARY} pieces; set model.vocab_size={SMALLEST_TRAINED_VOCABULARY} or more"
            )
    if data.name == "synthetic":
        if data.num_tokens <= config.model.seq_length:
            raise ConfigError(
                f"data.num_tokens={data.num_tokens}: must be above model.seq_length={config.model.seq_length}"
            )
        _within("data.branching", data.branching, 1, config.model.vocab_size, open_end=False)
    if (
        data.name == "hf"
        and data.split != "train"
        and PurePath(data.path).suffix in (".txt", ".jsonl", ".json", ".parquet")
    ):
        raise ConfigError(f"data.split={data.split}: local files have only the split train; set data.split=train")
    # on a cluster that is only planned for, the plan comes first; `megaasync.launch` asks for the path then
    is_planned = config.dry_run or config.cluster.name != "local"
    if data.name in ("indexed", "hf") and not data.path and not is_planned:
        raise ConfigError(f"data.path is empty: data={data.name} needs to know what to read; set data.path=...")


RULES: tuple[Callable[[Config], None], ...] = (
    check_sizes,
    check_attention,
    check_experts,
    check_layout,
    check_tensor,
    check_kernels,
    check_documents,
    check_expert_parallel,
    check_cluster,
    check_batch,
    check_schedule,
    check_checkpoints,
    check_optimizer,
    check_lr_schedule,
    check_data,
)


def validate(config: Config) -> Config:
    """Apply every rule; returns the config unchanged.

    Raises:
        ConfigError: the first rule that is broken.
    """
    for rule in RULES:
        rule(config)
    return config
