"""Exhaustive over small sizes: every rule holds, derived figures equal the theory, and broken tables are noticed."""

import doctest
from dataclasses import replace

import pytest

import megaasync.schedules.action
import megaasync.schedules.stream_1f1b
from megaasync.schedules import (
    SCHEDULES,
    Action,
    Costs,
    Op,
    ScheduleError,
    bubble_of,
    check,
    check_table,
    parse_action,
    render_svg,
    report,
    simulate,
    unroll,
    unroll_all,
)

SIZES = [(p, m) for p in range(1, 9) for m in range(1, 13)]
LEGAL = [(n, p, m) for n in SCHEDULES for p, m in SIZES if n != "2bw" or m >= p - 1]


def build(name, stages, microbatches):
    return SCHEDULES[name](num_stages=stages, num_microbatches=microbatches)


@pytest.mark.parametrize("module", [megaasync.schedules.action, megaasync.schedules.stream_1f1b])
def test_doctests(module):
    result = doctest.testmod(module)
    assert result.attempted > 0
    assert result.failed == 0


def test_every_rule_holds():
    for case in LEGAL:
        check(build(*case))


def test_2bw_with_too_few_microbatches_is_refused_and_says_why():
    for stages in range(3, 9):
        for microbatches in range(1, stages - 1):
            with pytest.raises(ScheduleError, match=f"at least P - 1 = {stages - 1} microbatches"):
                build("2bw", stages, microbatches)


def test_the_depth_rule_is_exact():
    """Without the refusal, the checker finds the same bound: one microbatch fewer cannot run."""
    for stages in range(3, 7):
        legal = build("2bw", stages, stages - 1)
        fill, steady = [], []
        m = stages - 2
        for stage in range(stages):
            ahead = stages - 1 - stage
            fill.append(tuple(Action(Op.F, stage, *divmod(k, m)) for k in range(ahead)))
            order = []
            for k in range(m):
                order += [Action(Op.F, stage, *divmod(ahead + k, m)), Action(Op.B, stage, 0, k)]
            steady.append((*order, Action(Op.NORM, stage, 0)))
        short = replace(legal, num_microbatches=m, fill=tuple(fill), steady=tuple(steady))
        with pytest.raises(ScheduleError):
            check(short)


@pytest.mark.parametrize(("p", "m"), SIZES)
def test_bubble_of_1f1b_is_the_formula(p, m):
    assert report(build("1f1b", p, m)).bubble == pytest.approx((p - 1) / (m + p - 1))


@pytest.mark.parametrize(("p", "m"), [(p, m) for p, m in SIZES if m >= p - 1])
def test_figures_of_2bw_are_the_theory(p, m):
    forward, backward = 1.0, 2.0
    figures = report(build("2bw", p, m), costs=Costs(forward, backward))
    assert figures.bubble == pytest.approx(0)
    assert figures.versions == (2,) * p
    assert figures.activations == tuple(p - s for s in range(p))
    slack = tuple((m - p + 1) * (forward + backward) + s * forward for s in range(p))
    assert figures.slack == pytest.approx(slack)
    assert max(figures.gradient_buffers) <= 2


@pytest.mark.parametrize("p", [2, 4, 8])
@pytest.mark.parametrize("hop", [0.1, 0.3])
def test_hop_latency_idles_2bw_as_the_loop_predicts(p, hop):
    """P microbatches circulate: P (F + B) of work and 2 (P-1) hops per round (METHOD.md section 2: 3 to 15 %)."""
    idle = report(build("2bw", p, 2 * p), costs=Costs(1, 2, hop=hop)).bubble
    assert idle == pytest.approx(1 - 3 / (3 + 2 * (p - 1) * hop / p))


def test_versions_follow_the_delay():
    schedule = build("2bw", 4, 4)
    assert [schedule.version(stage=0, step=t) for t in range(4)] == [0, 0, 1, 2]
    assert [schedule.staleness(t) for t in range(4)] == [0, 1, 1, 1]
    assert build("1f1b", 4, 4).staleness(5) == 0


def test_segments_join_to_the_same_steps():
    """Cutting a run into segments leaves out no action and does none twice; pending STEPs are carried over."""
    for name, p, m in LEGAL:
        if m > 5 or p > 4:
            continue
        schedule = build(name, p, m)
        for rank in range(p):
            actions, updates = [], 0
            for first, end in ((0, 1), (1, 3), (3, 6)):
                part = list(
                    unroll(schedule, rank=rank, first_step=first, end_step=lambda e=end: e, num_updates=updates)
                )
                updates += sum(a.op is Op.STEP for a in part)
                actions += part
            assert updates == 6 - schedule.delay[rank]
            actions += unroll(schedule, rank=rank, first_step=6, end_step=lambda: 6, num_updates=updates, settle=True)
            straight = unroll_all(schedule, num_steps=6)[rank]
            assert len(actions) == len(set(actions)) == len(straight)
            assert set(actions) == set(straight)
            for op in (Op.F, Op.B, Op.STEP):
                assert [a for a in actions if a.op is op] == [a for a in straight if a.op is op]


def test_cutting_a_run_short_ends_all_ranks_at_one_step():
    """As the executor does on a stop: when STEP(2) is made, the end moves to the step that needed it."""
    for name in SCHEDULES:
        schedule = build(name, 4, 4)
        for rank in range(4):
            end, seen = [50], []
            for action in unroll(schedule, rank=rank, first_step=0, end_step=lambda end=end: end[0], num_updates=0):
                seen.append(action)
                if action.op is Op.STEP and action.step == 2:
                    end[0] = 3 + schedule.delay[0]
            steps = {a.step for a in seen if a.op in (Op.F, Op.B)}
            assert steps == set(range(3 + schedule.delay[0]))
            applied = [a.step for a in seen if a.op is Op.STEP]
            assert applied == list(range(3)), "the gradients that the delay leaves pending stay pending"
            assert sum(a.op is Op.F for a in seen) == sum(a.op is Op.B for a in seen) == 4 * len(steps)


def broken(table, rank, **change):
    """The table with one edit on one rank."""
    copy = [list(actions) for actions in table]
    if "drop" in change:
        copy[rank].remove(change["drop"])
    for pair in change.get("swap", ()):
        i, j = (copy[rank].index(a) for a in pair)
        copy[rank][i], copy[rank][j] = copy[rank][j], copy[rank][i]
    if "move_to_rank" in change:
        action, other = change["move_to_rank"]
        copy[rank].remove(action)
        copy[other].append(action)
    return copy


def a(text):
    return parse_action(text)


@pytest.mark.parametrize(
    ("rule", "rank", "change"),
    [
        ("complete", 1, {"drop": a("1S3")}),
        ("placed", 1, {"move_to_rank": (a("1S3"), 0)}),
        ("ordered", 1, {"swap": [(a("1F1.0"), a("1B1.0"))]}),
        ("ordered", 0, {"swap": [(a("0N1"), a("0B1.1"))]}),
        ("versioned", 1, {"swap": [(a("1S0"), a("1F2.0"))]}),
        ("fifo", 1, {"swap": [(a("1F2.0"), a("1F2.1")), (a("1B2.0"), a("1B2.1"))]}),
    ],
)
def test_broken_tables_are_noticed(rule, rank, change):
    schedule = build("2bw", 2, 2)
    table = unroll_all(schedule, num_steps=4)
    check_table(schedule, table, steps=range(4))
    with pytest.raises(ScheduleError, match=f"^{rule}"):
        check_table(schedule, broken(table, rank, **change), steps=range(4))


def test_a_wrong_delay_is_noticed():
    """The stream of 2bw claiming delay 0 would need a version that is made only later."""
    schedule = replace(build("2bw", 2, 2), delay=(0, 0))
    with pytest.raises(ScheduleError, match="ordered|versioned"):
        check(schedule)


def test_a_deadlock_is_noticed():
    schedule = build("1f1b", 2, 1)
    stuck = replace(
        schedule,
        steady=((a("0F0.0"), a("0B0.0"), a("0N0")), (a("1F0.0"), a("1B0.0"), a("1N0"))),
        rank_of_stage=(0, 1),
    )
    check(stuck)
    # stage 1's rank wants the second step's input before it has answered the first
    wrong = unroll_all(stuck, num_steps=2)
    wrong[1] = [a("1F0.0"), a("1F1.0"), a("1B0.0"), a("1N0"), a("1S0"), a("1B1.0"), a("1N1"), a("1S1")]
    with pytest.raises(ScheduleError, match="live: deadlock|versioned"):
        check_table(replace(stuck, delay=(0, 1)), wrong, steps=range(2))


def test_errors_show_the_place():
    schedule = build("2bw", 2, 2)
    table = broken(unroll_all(schedule, num_steps=4), 1, swap=[(a("1F1.0"), a("1B1.0"))])
    with pytest.raises(ScheduleError, match="<-- here"):
        check_table(schedule, table, steps=range(4))


def test_bubble_of_spans_counts_what_the_contract_says():
    """From the first F of one step to the last action of another; only F and B are busy."""
    schedule = build("1f1b", 2, 2)
    spans = simulate(schedule, num_steps=5, costs=Costs(1, 2, step=1))
    # a step is 3 microbatches of 3 units and the optimizer's one: 2 of 3 microbatches' time is busy
    assert bubble_of(spans, num_ranks=2, first_step=1, last_step=3) == pytest.approx(1 - 6 / 10)


def test_svg_is_well_formed():
    import xml.etree.ElementTree as ET

    spans = simulate(build("2bw", 4, 4), num_steps=2)
    root = ET.fromstring(render_svg(spans, title="a < b", unit="forwards"))
    assert root.tag.endswith("svg")
    assert sum(e.tag.endswith("rect") for e in root.iter()) >= 4 * 2 * 4 * 2


@pytest.mark.parametrize("text", ["2F5.0", "0B1.3", "1N7", "3S2"])
def test_actions_are_read_back(text):
    assert str(parse_action(text)) == text


def test_a_bad_action_is_refused():
    with pytest.raises(ValueError, match="expected a form like"):
        parse_action("F2")
