"""2bw: the depth rule, and the theory of its bubble, buffers and slack."""

from dataclasses import replace

import pytest

from megaasync.schedules import Action, Costs, Op, ScheduleError, check, schedule_metrics
from tests.support.tables import SIZES, build, is_defined


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


@pytest.mark.parametrize("extra", [0, 1])
def test_figures_are_the_theory(extra):
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


@pytest.mark.parametrize("p", [2, 4, 8])
@pytest.mark.parametrize("hop", [0.1, 0.3])
def test_hop_latency_idles_it_until_more_is_in_flight(p, hop):
    """P microbatches circulate: P (F + B) of work and 2 (P-1) hops per round (docs/method.md: 3 to 15 %)."""
    costs = Costs(1, 2, hop=hop)
    assert schedule_metrics(build("2bw", p, 2 * p), costs=costs).bubble == pytest.approx(
        1 - 3 / (3 + 2 * (p - 1) * hop / p)
    )
    assert schedule_metrics(build("2bw", p, 2 * p, extra=1), costs=costs).bubble == pytest.approx(0)


def test_a_step_longer_than_the_slack_is_exposed_by_what_is_over():
    p, m = 4, 8
    slack = schedule_metrics(build("2bw", p, m)).slack[0]
    for over in (0.0, 2.0):
        costs = Costs(1, 2, step=slack + over)
        assert schedule_metrics(build("2bw", p, m), costs=costs, overlap=True).exposed == pytest.approx(over)
