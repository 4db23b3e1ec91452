"""What is measured: one engine, one schedule, one size."""

from dataclasses import dataclass

# class name in torch.distributed.pipelining, stages per rank, and whether they lie in a V
TORCH_SCHEDULES = {
    "ScheduleGPipe": (1, False),
    "Schedule1F1B": (1, False),
    "ScheduleInterleaved1F1B": (2, False),
    "ScheduleInterleavedZeroBubble": (2, False),
    "ScheduleZBVZeroBubble": (2, True),
}


@dataclass(frozen=True, slots=True)
class Emulation:
    """Costs of emulated actions, in seconds of sleep; of a whole rank, so a chunk takes its share.

    Attributes:
        forward, backward: of one microbatch. A split backward is half input and half weight gradients.
        hop: from the end of an action to the moment its message may be used on another rank.
        reduce: data-parallel reduction, per rank and step.
        step: optimizer, per rank and step.
        real_update: reduction and step are real instead: two data-parallel replicas of the pipeline sum 8 MiB per rank
            through gloo, and every rank orthogonalises eight 256 x 256 matrices.
    """

    forward: float
    backward: float
    hop: float = 0.0
    reduce: float = 0.0
    step: float = 0.0
    real_update: bool = False

    @property
    def replicas(self) -> int:
        """Data-parallel copies of the pipeline."""
        return 2 if self.real_update else 1


@dataclass(frozen=True, slots=True)
class Case:
    """One measurement.

    Attributes:
        engine: "megaasync" or "torch".
        schedule: a name of `megaasync.schedules.SCHEDULES`, or of a class of torch.distributed.pipelining.
        num_ranks, num_microbatches, extra_in_flight: sizes.
        num_steps: steps run; the first and the last are not measured.
        overlap: the optimizer step runs in the background.
    """

    engine: str
    schedule: str
    num_ranks: int
    num_microbatches: int
    num_steps: int
    extra_in_flight: int = 0
    overlap: bool = True

    @property
    def label(self) -> str:
        """For tables."""
        notes = [f"e = {self.extra_in_flight}"] if self.extra_in_flight else []
        notes += [] if self.overlap else ["exposed step"]
        return f"{self.engine} {self.schedule}" + (f" ({', '.join(notes)})" if notes else "")


@dataclass(frozen=True, slots=True)
class Measured:
    """What one measurement gave.

    Attributes:
        period: seconds per step.
        bubble: share of all ranks' time outside forward and backward; None where it is not recorded.
    """

    period: float
    bubble: float | None
