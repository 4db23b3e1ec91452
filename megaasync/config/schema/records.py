"""What a run writes down and where: groups `checkpoint`, `logging` and `run`."""

from dataclasses import dataclass
from typing import Annotated, Literal

from megaasync.fields import Range


@dataclass(frozen=True, slots=True)
class WandbConfig:
    """Weights & Biases tracking; `project` and `run_name` as there, `run_name` null takes the folder's."""

    mode: Literal["disabled", "offline", "online"]
    project: str
    run_name: str | None


@dataclass(frozen=True, slots=True)
class CheckpointConfig:
    """Checkpoints below run.dir/checkpoints.

    Attributes:
        interval: steps between them; there is one at the end and one at a stop too. null makes none.
        keep: newest ones that are kept.
        resume: `auto` goes on from the newest complete one in run.dir, if there is one; `never`; or a checkpoint's
            folder, which then wins.
        async_save: write beside the training; the pipeline waits for one copy of the state only.
        override: resume although the lr or another setting of the training is not the checkpoint's.
    """

    interval: Annotated[int | None, Range(at_least=1)]
    keep: Annotated[int, Range(at_least=1)]
    resume: str
    async_save: bool
    override: bool


@dataclass(frozen=True, slots=True)
class LoggingConfig:
    """What is written down.

    Attributes:
        interval: steps between progress lines; metrics.jsonl has every step.
        trace: write the measured timeline as trace.json.
        spike_threshold: robust standard deviations of the last 100 losses above their median that make a spike, which
            is written and told of; null for none.
    """

    interval: Annotated[int, Range(at_least=1)]
    trace: bool
    spike_threshold: Annotated[float | None, Range(above=0, remedy="set null to watch for none")]
    wandb: WandbConfig


@dataclass(frozen=True, slots=True)
class RunConfig:
    """Where the run is, and how often it is restarted.

    Attributes:
        dir: the run folder; null makes a new one under runs/.
        max_restarts: restarts of the ranks of this host, from the last checkpoint, when one dies, hangs or fails; not
            when training itself fails. Under torchrun that is its own --max-restarts.
    """

    dir: str | None
    max_restarts: Annotated[int, Range(at_least=0)]
