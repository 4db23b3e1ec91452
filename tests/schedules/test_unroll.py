"""Segments, stops and phases: which actions the tables become."""

from megaasync.schedules import (
    COMPUTE_OPS,
    SCHEDULES,
    Op,
    Segment,
    make_phases,
    unroll,
    unroll_all,
)
from tests.support.tables import LEGAL, build

SMALL = [case for case in LEGAL if case[1] <= 4 and case[2] <= 6 and case[4] < 2]


def test_segments_join_to_the_same_steps():
    """Cutting a run into segments leaves out no action and does none twice; pending STEPs are carried over."""
    for case in SMALL:
        schedule = build(*case)
        for rank in range(schedule.num_ranks):
            actions = []
            for first, end in ((0, 1), (1, 3), (3, 6)):
                actions += unroll(schedule, Segment(schedule, first, end), rank=rank)
            made = {s: sum(a.op is Op.STEP and a.stage == s for a in actions) for s in schedule.stages_of(rank)}
            assert made == {s: max(6 - schedule.delay[s], 0) for s in made}
            actions += unroll(schedule, Segment(schedule, 6, 6), rank=rank, flush=True)
            straight = [a for a in unroll_all(schedule, num_steps=6)[rank] if a.op is not Op.SYNC]
            actions = [a for a in actions if a.op is not Op.SYNC]
            assert len(actions) == len(set(actions)) == len(straight)
            assert set(actions) == set(straight)


def test_every_step_is_permitted_by_an_earlier_result():
    """Before a rank's first forward of step u stands SYNC(u - 1 - longest delay): there it may hear of a stop."""
    for case in SMALL:
        schedule = build(*case)
        longest = max(schedule.delay)
        for actions in unroll_all(schedule, num_steps=6):
            heard = -1
            for action in actions:
                if action.op is Op.SYNC:
                    assert action.step == heard + 1
                    heard = action.step
                if action.op is Op.F:
                    assert heard >= action.step - 1 - longest


def test_cutting_a_run_short_ends_all_ranks_at_one_step():
    """As the executor does on a stop: with SYNC(2) the end moves to the first step that nobody has begun."""
    for case in SMALL:
        schedule = build(*case)
        for rank in range(schedule.num_ranks):
            segment, seen = Segment(schedule, 0, 50), []
            for action in unroll(schedule, segment, rank=rank, flush=True):
                seen.append(action)
                if action.op is Op.SYNC and action.step == 2:
                    segment.stop_after(2)
            assert {a.step for a in seen if a.op in COMPUTE_OPS} == set(range(3 + max(schedule.delay)))
            for stage in schedule.stages_of(rank):
                made = [a.step for a in seen if a.op is Op.STEP and a.stage == stage]
                pending = schedule.delay[stage]
                assert made == list(range(3 + max(schedule.delay) - pending)), "pending gradients stay pending"


def test_phases_of_a_run():
    size = {"num_ranks": 2, "num_microbatches": 4, "virtual_stages": None, "extra_in_flight": 0, "tied": False}
    phases = make_phases("2bw", num_steps=20, sync_start_steps=5, sync_cooldown_steps=3, **size)
    assert [(p.schedule.name, p.first_step, p.end_step, p.flush_at_end) for p in phases] == [
        ("1f1b", 0, 5, True),
        ("2bw", 5, 17, True),
        ("1f1b", 17, 20, False),
    ]
    assert [p.schedule.start_step for p in phases] == [0, 5, 17]
    assert [phases[1].lookahead_steps(stage=0, step=t) for t in (5, 15, 16)] == [1, 1, 0]
    assert len(make_phases("wpipe", num_steps=4, sync_start_steps=1, sync_cooldown_steps=0, **size)) == 2


def test_synchronous_phases_have_the_placement_of_their_schedule():
    for name, kind in SCHEDULES.items():
        assert kind.has_delay == (kind.synchronous is not None)
        if kind.has_delay:
            m = 1 if name == "pipedream" else 4
            pair = build(name, 4, m), build(kind.synchronous, 4, m)
            assert pair[0].rank_of_stage == pair[1].rank_of_stage
            assert pair[0].is_asynchronous and not pair[1].is_asynchronous
