"""Exhaustive over small sizes: every rule holds, derived figures equal the theory, and broken tables are noticed."""

import doctest
import itertools
from dataclasses import replace

import pytest

import megaasync.schedules.action
import megaasync.schedules.asynchronous
import megaasync.schedules.synchronous
import megaasync.schedules.zero_bubble
from megaasync.schedules import (
    COMPUTE_OPS,
    SCHEDULES,
    Action,
    Costs,
    Op,
    ScheduleError,
    check,
    schedule_metrics,
    simulate,
)
from tests.support.tables import CHUNKS, LEGAL, SIZES, build, is_defined


@pytest.mark.parametrize("name", ["action", "asynchronous", "synchronous", "zero_bubble"])
def test_doctests(name):
    result = doctest.testmod(getattr(megaasync.schedules, name))
    assert result.attempted > 0
    assert result.failed == 0


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("tied", [False, True])
def test_every_rule_holds(name, tied):
    cases = [case for case in LEGAL if case[0] == name]
    assert len(cases) > 5
    for _, p, m, virtual_stages, extra in cases:
        if name == "pipedream" and tied and p > 1:
            with pytest.raises(ScheduleError, match="cannot tie the embeddings"):
                build(name, p, m, virtual_stages, extra, tied)
        else:
            check(build(name, p, m, virtual_stages, extra, tied), num_steps=5)


@pytest.mark.parametrize("name", SCHEDULES)
def test_other_sizes_are_refused(name):
    kind = SCHEDULES[name]
    for (p, m), extra in itertools.product(SIZES, (0, 1) if kind.takes_extra_in_flight else (0,)):
        if not is_defined(name, p, m, extra):
            with pytest.raises(ScheduleError, match=name):
                build(name, p, m, extra=extra)
    for virtual_stages in {1, 2, 3} - set(CHUNKS.get(name, (1,))):
        with pytest.raises(ScheduleError, match="stage.* per rank"):
            build(name, 2, 4, virtual_stages)
    if not kind.takes_extra_in_flight:
        with pytest.raises(ScheduleError, match="no extra forwards in flight"):
            build(name, 2, 1, extra=1)


@pytest.mark.parametrize("extra", [0, 1])
def test_the_depth_rule_is_exact(extra):
    """Without the refusal, the checker finds the same bound: one microbatch fewer cannot run."""
    for p in range(3, 7):
        m = (1 + extra) * (p - 1) - 1
        with pytest.raises(ScheduleError, match=f"needs m >= .*P - 1.* = {m + 1} microbatches.*deadlock"):
            build("2bw", p, m, extra=extra)
        legal = build("2bw", p, m + 1, extra=extra)
        fill, steady = [], []
        for stage in range(p):
            ahead = (1 + extra) * (p - 1 - stage)
            fill.append(tuple(Action(Op.F, stage, *divmod(k, m)) for k in range(ahead)))
            order = []
            for k in range(m):
                order += [Action(Op.F, stage, *divmod(ahead + k, m)), Action(Op.B, stage, 0, k)]
            steady.append((*order, Action(Op.REDUCE_GRAD, stage, 0)))
        with pytest.raises(ScheduleError):
            check(replace(legal, num_microbatches=m, fill=tuple(fill), steady=tuple(steady)))


def test_bubbles_of_synchronous_schedules_are_the_formulas():
    for p, m in SIZES:
        for name in ("gpipe", "1f1b"):
            assert schedule_metrics(build(name, p, m)).bubble == pytest.approx((p - 1) / (m + p - 1)), (name, p, m)
        for v in (2, 3):
            if m % p == 0:
                bubble = schedule_metrics(build("interleaved_1f1b", p, m, v)).bubble
                assert bubble == pytest.approx((p - 1) / (v * m + p - 1)), (p, m, v)


@pytest.mark.parametrize(("f", "i", "w"), [(1, 1, 1), (1, 1, 0.5), (1, 0.8, 1), (2, 2, 1), (1, 1.2, 0.9)])
def test_bubble_of_zb_h1_is_the_formula(f, i, w):
    for p, m in SIZES:
        if m >= p:
            idle = (p - 1) * max(f + i - w, f)  # the last rank starts after P - 1 forwards, whatever W costs
            wanted = idle / (m * (f + i + w) + idle)
            bubble = schedule_metrics(build("zb_h1", p, m), costs=Costs(f, i + w, w)).bubble
            assert bubble == pytest.approx(wanted, abs=1e-12), (p, m)


def test_zbv_wastes_little_more_than_its_flush():
    """At best every rank works without a pause between a start and an end that are P - 1 units apart."""
    for p, m in SIZES:
        if m >= p:
            period = schedule_metrics(build("zbv", p, m)).period
            assert 6 * m + p - 1 <= period <= 6 * m + p - 1 + 3, (p, m)


@pytest.mark.parametrize("extra", [0, 1])
def test_figures_of_2bw_are_the_theory(extra):
    f, b = 1.0, 2.0
    for p, m in SIZES:
        if not is_defined("2bw", p, m, extra):
            continue
        figures = schedule_metrics(build("2bw", p, m, extra=extra), costs=Costs(f, b))
        assert figures.bubble == pytest.approx(0)
        assert figures.versions == (2,) * p
        assert figures.activations == tuple(1 + (1 + extra) * (p - 1 - s) for s in range(p))
        assert max(figures.gradient_buffers) <= 2
        if not extra:
            before = tuple((m - p + 1 + s) * (f + b) for s in range(p))
            after = tuple((m - p + 1) * (f + b) + s * f for s in range(p))
            assert figures.slack_before_norm == pytest.approx(before)
            assert figures.slack == pytest.approx(after)


def test_other_asynchronous_schedules_are_the_theory():
    for p, m in SIZES:
        if is_defined("interleaved_2bw", p, m):
            figures = schedule_metrics(build("interleaved_2bw", p, m))
            assert figures.bubble == pytest.approx(0)
            assert figures.versions == (2,) * (2 * p)
        if m >= p:
            figures = schedule_metrics(build("wpipe", p, m))
            assert figures.bubble == pytest.approx((p - 1) / (2 * m + p - 1))
            assert figures.versions == (2,) * p + (1,) * p
        figures = schedule_metrics(build("pipedream", p, 1))
        assert figures.bubble == pytest.approx(0)
        assert figures.versions == figures.activations == tuple(p - s for s in range(p))


@pytest.mark.parametrize("p", [2, 4, 8])
@pytest.mark.parametrize("hop", [0.1, 0.3])
def test_hop_latency_idles_2bw_until_more_is_in_flight(p, hop):
    """P microbatches circulate: P (F + B) of work and 2 (P-1) hops per round (docs/method.md: 3 to 15 %)."""
    costs = Costs(1, 2, hop=hop)
    assert schedule_metrics(build("2bw", p, 2 * p), costs=costs).bubble == pytest.approx(
        1 - 3 / (3 + 2 * (p - 1) * hop / p)
    )
    assert schedule_metrics(build("2bw", p, 2 * p, extra=1), costs=costs).bubble == pytest.approx(0)


@pytest.mark.parametrize("p", [2, 4, 8])
def test_reduction_and_step_hide_under_2bw_and_not_under_1f1b(p):
    """Together they cost two microbatches, m = 2P."""
    costs = Costs(1, 2, reduce=3, step=3)
    assert schedule_metrics(build("pipedream", p, 1), costs=costs, overlap=True).exposed == pytest.approx(
        6
    )  # steps in its table
    for name, overlap, exposed in (("2bw", True, 0), ("2bw", False, 6), ("1f1b", True, 6), ("1f1b", False, 6)):
        figures = schedule_metrics(build(name, p, 2 * p), costs=costs, overlap=overlap)
        assert figures.exposed == pytest.approx(exposed), (name, overlap)


def test_a_step_longer_than_the_slack_is_exposed_by_what_is_over():
    p, m = 4, 8
    slack = schedule_metrics(build("2bw", p, m)).slack[0]
    for over in (0.0, 2.0):
        costs = Costs(1, 2, step=slack + over)
        assert schedule_metrics(build("2bw", p, m), costs=costs, overlap=True).exposed == pytest.approx(over)


def test_uneven_stages_cost_what_the_slowest_costs():
    costs = Costs(1, 2, scale=(1.0, 1.5, 1.0, 1.0))
    figures = schedule_metrics(build("2bw", 4, 8), costs=costs)
    assert figures.period == pytest.approx(8 * 4.5)
    assert figures.bubble == pytest.approx(1 - 4.5 / (4 * 1.5))


def test_background_work_stands_beside():
    spans = simulate(build("2bw", 2, 4), num_steps=5, costs=Costs(1, 2, step=2), overlap=True)
    steps = [s for s in spans if s.action.op is Op.STEP and s.beside and s.action.step == 2]
    assert [s.end - s.start for s in steps] == [2, 2]
    for step in steps:
        under = [
            s
            for s in spans
            if s.rank == step.rank and s.action.op in COMPUTE_OPS and s.start < step.end and s.end > step.start
        ]
        assert sum(min(s.end, step.end) - max(s.start, step.start) for s in under) == pytest.approx(2)


def test_versions_follow_the_delay_and_the_phase():
    schedule = build("2bw", 4, 4)
    assert [schedule.version(stage=0, step=t) for t in range(4)] == [0, 0, 1, 2]
    assert [schedule.staleness(t) for t in range(4)] == [0, 1, 1, 1]
    later = replace(schedule, start_step=10)
    assert [later.version(stage=0, step=t) for t in range(10, 14)] == [10, 10, 11, 12]
    assert build("1f1b", 4, 4).staleness(5) == 0
    assert [build("pipedream", 4, 1).staleness(t) for t in range(6)] == [0, 1, 2, 3, 3, 3]
