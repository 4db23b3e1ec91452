"""Real compute on our engine: the product's own trainer on synthetic tokens."""

from datetime import timedelta

import torch

from megaasync.config import Config, read, validate
from megaasync.data.prepare import PreparedData
from megaasync.distributed.environment import RankEnvironment
from megaasync.distributed.groups import join_group, leave_group
from megaasync.observe.trace import Timeline
from megaasync.train.build import build_trainer

from ..command_line import compose_plain
from .case import Case
from .emulated import EmulatedRun, measure

# A dense model whose layers are equal and whose head is small, so that two or four stages cost the same, with enough
# tokens per microbatch that compute outweighs the optimizer step.
MODEL = [
    "model=tiny_dense",
    "model.num_layers=8",
    "model.hidden_size=128",
    "model.num_heads=4",
    "model.num_kv_heads=4",
    "model.ffn_hidden_size=384",
    "model.vocab_size=512",
    "model.seq_length=128",
    "optimizer=adamw",
    "data=synthetic",
    "train.micro_batch_size=8",
    "train.eval_sequences=1",
    "device=cpu",
]


def real_config(case: Case, overrides: tuple[str, ...]) -> Config:
    """The config of a real run; for torch's schedules the schedule in it is 1f1b and is not used.

    Raises:
        ConfigError: the overrides are wrong.
    """
    is_ours = case.engine == "megaasync"
    settings = [
        *MODEL,
        *overrides,
        f"schedule={case.schedule if is_ours else '1f1b'}",
        f"parallel.pipeline={case.num_ranks}",
        f"train.steps={case.num_steps}",
        *([f"schedule.extra_in_flight={case.extra_in_flight}"] if case.extra_in_flight else []),
        f"schedule.overlap_step={str(case.overlap).lower()}",
    ]
    plain = compose_plain(settings)
    plain["train"]["global_batch_size"] = case.num_microbatches * plain["train"]["micro_batch_size"]
    return validate(read(Config, plain))


class _Losses:
    def __init__(self) -> None:
        self.of_step: list[float] = []

    def on_row(self, row: dict) -> None:
        """Keep the training losses."""
        if row["kind"] == "train":
            self.of_step.append(row["loss"])


def run_rank(environment: RankEnvironment, config: Config) -> tuple[Timeline, list[float]]:
    """One rank of a run: on rank 0 everyone's timeline and the losses."""
    device = torch.device("cpu")
    join_group(environment, device=device, timeout=timedelta(seconds=config.parallel.timeout_seconds))
    torch.set_num_threads(1)
    losses = _Losses()
    trainer = build_trainer(
        config, environment=environment, prepared=PreparedData(None, None, None), device=device, observer=losses
    )
    outcome = trainer.train()
    leave_group()
    return outcome.timeline, losses.of_step


def measure_timeline(timeline: Timeline, case: Case) -> EmulatedRun:
    """Period and bubble of a real run, as of an emulated one."""
    return measure([[s for s in timeline.spans if s.rank == rank] for rank in range(case.num_ranks)], case)
