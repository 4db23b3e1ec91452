"""When a receive may be posted: where its message needs nothing more of the rank that posts it.

On NCCL a posted receive is a kernel that waits on the GPU. If its message depends on something that its own rank has
still to launch, then whatever makes that rank's host wait for an idle device meanwhile (a kernel that is loaded at its
first use, memory that is freed, a connection that is set up, one hardware queue) waits for ever. So a table says for
each receive which of the rank's own actions its message needs last, and the receive is posted after that.
"""

from collections import Counter, defaultdict, deque

from megaasync.schedules.action import Action, Op
from megaasync.schedules.rules import waits_for
from megaasync.schedules.schedule import PipelineSchedule
from megaasync.schedules.unroll import Segment, unroll, unroll_all

BACKWARD_OPS = (Op.B, Op.I)
Channel = tuple[Op, int]  # direction, sending rank


def sender_of(schedule: PipelineSchedule, action: Action) -> int | None:
    """The other rank that sends what an action takes; None if it takes nothing, or from its own rank."""
    owners = schedule.rank_of_stage
    if action.op is Op.F and action.stage > 0:
        source = owners[action.stage - 1]
    elif action.op in BACKWARD_OPS and action.stage + 1 < len(owners):
        source = owners[action.stage + 1]
    else:
        return None
    return None if source == owners[action.stage] else source


def last_own_needs(schedule: PipelineSchedule, table: list[list[Action]], *, rank: int) -> dict[Action, Action | None]:
    """For each receive of a rank in an unrolled table of all ranks, the last own action that its message needs."""
    place = {action: index for index, action in enumerate(table[rank])}
    known = {action for actions in table for action in actions}
    needs: dict[Action, int] = {}  # of every action: the place of the last of this rank's that comes before it
    at = [0] * len(table)
    moved = True
    while moved:
        moved = False
        for other, actions in enumerate(table):
            while at[other] < len(actions):
                action = actions[at[other]]
                waited = [need for need in waits_for(schedule, action) if need in known]
                if any(need not in needs for need in waited):
                    break
                before = [needs[need] for need in waited]
                before += [needs[actions[at[other] - 1]]] if at[other] else []
                needs[action] = place[action] if other == rank else max(before, default=-1)
                at[other] += 1
                moved = True
    found: dict[Action, Action | None] = {}
    for action in table[rank]:
        if sender_of(schedule, action) is not None:
            (sent,) = waits_for(schedule, action)
            found[action] = table[rank][needs[sent]] if needs[sent] >= 0 else None
    return found


class LastNeeds:
    """What the message of each receive of a rank needs last, from the first steps of a segment to any step of it.

    The first steps are another table than the later ones, and taken as they are. Of the last steps some actions that
    would be needed do not come: those receives are posted where they are taken.

    Attributes:
        schedule: whose tables they were found in.
    """

    def __init__(self, schedule: PipelineSchedule, *, rank: int) -> None:
        self.schedule = schedule
        behind = max(schedule.delay) + 1  # steps of which a message may need something, beyond its own
        self._steady, first = behind + 2, schedule.start_step
        table = unroll_all(schedule, num_steps=self._steady + behind + 1, first_step=first)
        self._found: dict[tuple[Op, int, int, int | None], Action | None] = {
            (action.op, action.stage, action.step - first, action.microbatch): need and _moved(need, -first)
            for action, need in last_own_needs(schedule, table, rank=rank).items()
        }

    def of(self, action: Action, *, first_step: int) -> Action | None:
        """For the receive of an absolute action, in a segment that begins at `first_step`; None for nothing."""
        since = action.step - first_step
        known = min(since, self._steady)
        need = self._found[action.op, action.stage, known, action.microbatch]
        return need and _moved(need, first_step + since - known)


def _moved(action: Action, steps: int) -> Action:
    return Action(action.op, action.stage, action.step + steps, action.microbatch)


class UpcomingReceives:
    """Walks a rank's table ahead of the executor and says which receives may be posted.

    It goes as far as the next SYNC that has not been executed: steps behind that may be cut off by a stop, so every
    receive that is posted gets its message. Channels are named by their direction (`Op.F` forward, `Op.B` backward) and
    the sending rank.
    """

    def __init__(self, segment: Segment, *, rank: int, needs: LastNeeds, flush: bool = False) -> None:
        """Of one rank over a segment of the schedule that `needs` were made for, as `unroll`."""
        self._schedule, self._needs = needs.schedule, needs
        self._first = segment.first
        self._ahead = unroll(needs.schedule, segment, rank=rank, flush=flush)
        self._waiting: dict[Channel, deque[Action | None]] = defaultdict(deque)  # what receives to come need, in order
        self._posted: Counter[Channel] = Counter()  # and not taken
        self._done: dict[tuple[Op, int], tuple[int, int]] = {}  # newest own action by operation and stage
        self._walk()

    def start(self) -> list[Channel]:
        """Channels of the receives that may be posted before the first action, one for each."""
        return self._newly_possible()

    def before(self, action: Action) -> list[Channel]:
        """Of the receive that this action takes, if it could not be posted before."""
        channel = self._channel(action)
        if channel is None:
            return []
        late = not self._posted[channel]
        # where the end came down before the SYNC at which the walk stands, that SYNC is left out: on to the next
        while late and not self._waiting[channel] and self._walk():
            pass
        if not late:
            self._posted[channel] -= 1
            return []
        self._waiting[channel].popleft()
        return [channel]

    def after(self, action: Action) -> list[Channel]:
        """Of the receives that may be posted once this action has been launched, one for each."""
        self._done[action.op, action.stage] = _place(action)
        if action.op is Op.SYNC:
            self._walk()
        return self._newly_possible()

    def _walk(self) -> bool:
        """To the next SYNC; False at the end of the table."""
        for action in self._ahead:
            if action.op is Op.SYNC:
                return True
            channel = self._channel(action)
            if channel is not None:
                self._waiting[channel].append(self._needs.of(action, first_step=self._first))
        return False

    def _newly_possible(self) -> list[Channel]:
        found = []
        for channel, waiting in self._waiting.items():
            while waiting and self._is_done(waiting[0]):
                waiting.popleft()
                self._posted[channel] += 1
                found.append(channel)
        return found

    def _is_done(self, need: Action | None) -> bool:
        if need is None:
            return True
        newest = self._done.get((need.op, need.stage))
        return newest is not None and _place(need) <= newest

    def _channel(self, action: Action) -> Channel | None:
        sender = sender_of(self._schedule, action)
        return None if sender is None else (Op.F if action.op is Op.F else Op.B, sender)


def _place(action: Action) -> tuple[int, int]:
    """Order of the actions of one operation on one stage."""
    return action.step, -1 if action.microbatch is None else action.microbatch
