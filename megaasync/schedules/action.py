"""One cell of a pipeline table: which operation, of which stage, for which step and microbatch.

Text form: ``2F5.0`` is stage 2, forward, step 5, microbatch 0; ``2S5`` is the optimizer step that absorbs the
gradient of step 5 on stage 2.
"""

import re
from dataclasses import dataclass
from enum import Enum


class Op(Enum):
    """Operations of a pipeline table."""

    F = "F"  # forward of one microbatch
    B = "B"  # backward of one microbatch: input and weight gradients
    I = "I"  # noqa: E741 - the first half of a split backward: the gradient of the input
    W = "W"  # the second half: the gradients of the weights
    REDUCE_GRAD = "N"  # the stage's gradient sum is complete: its reduction and the global norm may begin
    SYNC = "R"  # the rank learns loss, norm and whether to stop; stands at its lowest stage
    STEP = "S"  # the gradient of `step` is absorbed; weight version step + 1 is written


COMPUTE_OPS = frozenset({Op.F, Op.B, Op.I, Op.W})

_WORDS = {
    Op.F: "forward",
    Op.B: "backward",
    Op.I: "input half of the backward",
    Op.W: "weight half of the backward",
    Op.REDUCE_GRAD: "gradient norm",
    Op.SYNC: "wait for the gradient norm",
    Op.STEP: "optimizer step",
}


@dataclass(frozen=True, slots=True)
class Action:
    """One operation. `step` is relative inside a schedule's tables and absolute once unrolled."""

    op: Op
    stage: int
    step: int
    microbatch: int | None = None

    def __str__(self) -> str:
        tail = "" if self.microbatch is None else f".{self.microbatch}"
        return f"{self.stage}{self.op.value}{self.step}{tail}"

    def describe(self) -> str:
        """In words, steps and microbatches from 1 and 0 as in messages."""
        tail = "" if self.microbatch is None else f", microbatch {self.microbatch}"
        return f"{_WORDS[self.op]} of step {self.step + 1} on stage {self.stage}{tail}"


_PATTERN = re.compile(r"(\d+)([FBIWNRS])(-?\d+)(?:\.(\d+))?")


def parse_action(text: str) -> Action:
    """Read an action back from its text form.

    Raises:
        ValueError: the text is not an action.

    Example:
        >>> parse_action("2F5.0")
        Action(op=<Op.F: 'F'>, stage=2, step=5, microbatch=0)
    """
    match = _PATTERN.fullmatch(text)
    if match is None:
        raise ValueError(f"'{text}' is not an action; expected a form like 2F5.0 or 2S5")
    stage, op, step, microbatch = match.groups()
    return Action(Op(op), int(stage), int(step), None if microbatch is None else int(microbatch))
