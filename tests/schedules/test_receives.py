"""No receive is posted while its message still needs its own rank, in any schedule; nor later than it must be."""

import itertools

import pytest

from megaasync.schedules import SCHEDULES, ScheduleError, Segment, build_schedule, unroll, unroll_all
from megaasync.schedules.receives import LastNeeds, UpcomingReceives, last_own_needs, sender_of
from tests.support.tiers import slow_params

SIZES = list(itertools.product((2, 3, 4, 8), (1, 2, 3, 4, 6, 8, 16)))
STEPS = 7


def posted(schedule, table, rank, *, num_steps=STEPS, prefetch=2):
    """By receiving action: after which place of the rank's table its receive is posted; -1 is before the first."""
    first, actions = schedule.start_step, table[rank]
    segment = Segment(schedule, first, first + num_steps)
    upcoming = UpcomingReceives(segment, rank=rank, needs=LastNeeds(schedule, rank=rank), flush=True)
    waiting = {}
    for action in actions:
        if sender_of(schedule, action) is not None:
            waiting.setdefault(upcoming._channel(action), []).append(action)
    permitted, outstanding, place = dict.fromkeys(waiting, 0), dict.fromkeys(waiting, 0), {}

    def post(channel, at):
        while permitted[channel] and outstanding[channel] < prefetch:
            place[waiting[channel].pop(0)] = at
            permitted[channel] -= 1
            outstanding[channel] += 1

    def permit(channels, at):
        for channel in channels:
            permitted[channel] += 1
            post(channel, at)

    permit(upcoming.start(), -1)
    for at, action in enumerate(actions):
        permit(upcoming.before(action), at - 1)
        if (channel := upcoming._channel(action)) is not None:
            outstanding[channel] -= 1
            post(channel, at - 1)
        permit(upcoming.after(action), at)
    assert not any(waiting.values()) and not any(permitted.values()) and not any(outstanding.values())
    return place


def count_self_dependent(schedule, *, num_steps=STEPS, prefetch=2, as_before=False):
    """(receives posted while their message still needed their rank, all receives)."""
    table = unroll_all(schedule, num_steps=num_steps, first_step=schedule.start_step)
    found = [0, 0]
    for rank, actions in enumerate(table):
        place = {action: at for at, action in enumerate(actions)}
        at = (
            two_ahead(schedule, actions)
            if as_before
            else posted(schedule, table, rank, num_steps=num_steps, prefetch=prefetch)
        )
        for action, need in last_own_needs(schedule, table, rank=rank).items():
            found[0] += need is not None and at[action] < place[need]
            found[1] += 1
    return tuple(found)


def two_ahead(schedule, actions):
    """Where receives were posted that looked at nothing: the first two at once, each other when one is taken."""
    channels = {}
    for at, action in enumerate(actions):
        if (sender := sender_of(schedule, action)) is not None:
            channels.setdefault((action.op.value == "F", sender), []).append((at, action))
    return {
        action: -1 if number < 2 else takes[number - 2][0] - 1
        for takes in channels.values()
        for number, (_, action) in enumerate(takes)
    }


def built(name, ranks, microbatches, extra=0):
    try:
        return build_schedule(name, num_ranks=ranks, num_microbatches=microbatches, extra_in_flight=extra)
    except ScheduleError:
        return None


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(
    ("ranks", "microbatches"), slow_params(SIZES, kept=[SIZES.index(s) for s in ((2, 2), (3, 1), (4, 1), (4, 8))])
)
def test_no_receive_waits_for_its_own_rank(name, ranks, microbatches):
    for extra in (0, 1):
        schedule = built(name, ranks, microbatches, extra)
        if schedule is not None:
            found, count = count_self_dependent(schedule, prefetch=2 + 2 * extra)
            assert found == 0 and count > 0


def test_posting_two_ahead_would():
    """What was done before this rule; the count says that the measure sees it."""
    found, count = count_self_dependent(built("2bw", 4, 8), num_steps=4, as_before=True)
    assert (found, count) == (180, 192)


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_receive_is_posted_as_early_as_it_may_be(name):
    """At its need or when one of two is taken; but for the last steps, and what a SYNC might still cut off."""
    schedule = built(name, 4, 8) or built(name, 4, 1)
    table = unroll_all(schedule, num_steps=STEPS, first_step=schedule.start_step)
    for rank, actions in enumerate(table):
        place = {action: at for at, action in enumerate(actions)}
        at, before = posted(schedule, table, rank), two_ahead(schedule, actions)
        syncs = [where for where, action in enumerate(actions) if action.op.value == "R"]
        last = schedule.start_step + STEPS - 1 - max(schedule.delay)
        for action, need in last_own_needs(schedule, table, rank=rank).items():
            if action.step < last:
                needed = -1 if need is None else place[need]
                permitted = max((where for where in syncs if where < place[action]), default=-1)
                assert at[action] <= max(needed, before[action], permitted), action


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_stop_leaves_no_receive_behind(name):
    """The end comes down at a SYNC: of the steps behind it no receive has been posted, of those before it all."""
    schedule = built(name, 4, 8) or built(name, 4, 1)
    first, longest = schedule.start_step, max(schedule.delay)
    for rank in range(4):
        segment = Segment(schedule, first, first + 9)
        upcoming = UpcomingReceives(segment, rank=rank, needs=LastNeeds(schedule, rank=rank))
        table, taken, given = unroll_all(schedule, num_steps=9, first_step=first, flush=False)[rank], 0, 0
        given += len(upcoming.start())
        for action in table:
            if action.step > first + 2 + longest:
                continue
            given += len(upcoming.before(action))
            taken += sender_of(schedule, action) is not None
            if action.op.value == "R" and action.step == first + 2:
                segment.stop_after(action.step)
            given += len(upcoming.after(action))
        assert given == taken


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_sync_that_is_left_out_leaves_no_receive_behind(name):
    """Where the step runner lowers the end before the executor comes to that SYNC."""
    schedule = built(name, 4, 8) or built(name, 4, 1)
    first = schedule.start_step
    for rank in range(4):
        segment = Segment(schedule, first, first + 9)
        upcoming = UpcomingReceives(segment, rank=rank, needs=LastNeeds(schedule, rank=rank))
        taken, given = 0, len(upcoming.start())
        for action in unroll(schedule, segment, rank=rank):
            if action.step == first + 2 + max(schedule.delay):
                segment.stop_after(first + 2)
            given += len(upcoming.before(action))
            taken += sender_of(schedule, action) is not None
            given += len(upcoming.after(action))
        assert given == taken and segment.end == first + 3 + max(schedule.delay)


def test_actions_of_one_kind_and_stage_come_in_order():
    """What has been done is known by the newest of them."""
    for name in SCHEDULES:
        for ranks, microbatches in SIZES:
            if (schedule := built(name, ranks, microbatches)) is None:
                continue
            for actions in unroll_all(schedule, num_steps=3, first_step=schedule.start_step):
                newest = {}
                for action in actions:
                    place = (action.step, -1 if action.microbatch is None else action.microbatch)
                    assert newest.get((action.op, action.stage), (-1, -1)) < place
                    newest[action.op, action.stage] = place
