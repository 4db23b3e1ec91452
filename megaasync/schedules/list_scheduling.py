"""An order from priorities, when no closed form is known: a greedy simulation in which every action takes one unit."""

from collections.abc import Callable
from dataclasses import dataclass, field

from megaasync.schedules.action import Action, Op

Priority = Callable[[Action], tuple[int, ...]]
_OPS = (Op.F, Op.I, Op.W)


@dataclass(frozen=True, slots=True)
class Orders:
    """Per rank, its actions in order; and the time at which the last one ends."""

    of_rank: list[list[Action]]
    makespan: int


@dataclass(slots=True)
class _State:
    """How far one batch is: the next microbatch of each stage and operation, and what is done since when."""

    next_of: dict[tuple[int, Op], int] = field(default_factory=dict)
    ended: dict[Action, int] = field(default_factory=dict)

    def is_done(self, action: Action, now: int) -> bool:
        return self.ended.get(action, now + 1) <= now

    def is_ready(self, action: Action, now: int, *, num_stages: int) -> bool:
        """Whether an action's inputs are there."""
        stage, microbatch = action.stage, action.microbatch
        if action.op is Op.F:
            return stage == 0 or self.is_done(Action(Op.F, stage - 1, 0, microbatch), now)
        if action.op is Op.W:
            return self.is_done(Action(Op.I, stage, 0, microbatch), now)
        after = stage == num_stages - 1 or self.is_done(Action(Op.I, stage + 1, 0, microbatch), now)
        return after and self.is_done(Action(Op.F, stage, 0, microbatch), now)


def list_schedule(
    rank_of_stage: tuple[int, ...], *, num_microbatches: int, in_flight: int, priority: Priority
) -> Orders:
    """Orders of one batch's F, I and W: a free rank takes the ready action of least priority.

    Args:
        rank_of_stage: rank that holds each stage.
        num_microbatches: of the batch; each stage takes them in order.
        in_flight: activations that a rank may hold, from F to W.
        priority: smallest first.
    """
    num_stages, num_ranks = len(rank_of_stage), max(rank_of_stage) + 1
    state = _State({(stage, op): 0 for stage in range(num_stages) for op in _OPS})
    orders: list[list[Action]] = [[] for _ in range(num_ranks)]
    held = [0] * num_ranks
    places = [
        [(stage, op) for stage, owner in enumerate(rank_of_stage) if owner == rank for op in _OPS]
        for rank in range(num_ranks)
    ]
    remaining, now = len(_OPS) * num_stages * num_microbatches, 0
    while remaining:
        for rank in range(num_ranks):
            ready = [
                action
                for stage, op in places[rank]
                if (microbatch := state.next_of[stage, op]) < num_microbatches
                and (op is not Op.F or held[rank] < in_flight)
                and state.is_ready(action := Action(op, stage, 0, microbatch), now, num_stages=num_stages)
            ]
            if not ready:
                continue
            action = min(ready, key=priority)
            state.next_of[action.stage, action.op] += 1
            state.ended[action] = now + 1
            held[rank] += {Op.F: 1, Op.I: 0, Op.W: -1}[action.op]
            orders[rank].append(action)
            remaining -= 1
        now += 1
    return Orders(orders, now)
