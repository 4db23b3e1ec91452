"""Exhaustive over small sizes: every rule holds, derived figures equal the theory, and broken tables are noticed."""

import doctest
import itertools
import xml.etree.ElementTree as ET
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
    Segment,
    bubble_of,
    build_schedule,
    check,
    check_table,
    make_phases,
    parse_action,
    render_svg,
    render_text,
    schedule_metrics,
    simulate,
    unroll,
    unroll_all,
)

SIZES = list(itertools.product(range(1, 7), range(1, 11)))  # (P, m)
CHUNKS = {"interleaved_1f1b": (2, 3), "interleaved_2bw": (2, 3), "zbv": (2,), "wpipe": (2,)}


def build(name, ranks, microbatches, virtual_stages=None, extra=0, tied=False):
    return build_schedule(
        name,
        num_ranks=ranks,
        num_microbatches=microbatches,
        virtual_stages=virtual_stages,
        extra_in_flight=extra,
        tied=tied,
    )


def is_defined(name, p, m, extra=0):
    """Written apart from the schedules: for which sizes each is promised."""
    if name == "pipedream":
        return m == 1
    if name.startswith("interleaved") and (m % p or (1 + extra) * (p - 1) > 2 * p):
        return False
    if name == "2bw":
        return m >= (1 + extra) * (p - 1)
    if name == "interleaved_2bw":  # v m >= (v - 1) P + (1 + e)(P - 1), for the least v tried
        return 2 * m >= p + (1 + extra) * (p - 1)
    return True


LEGAL = [
    (name, p, m, virtual_stages, extra)
    for name, kind in SCHEDULES.items()
    for p, m in SIZES
    for virtual_stages in CHUNKS.get(name, (1,))
    for extra in ((0, 1, 2) if kind.takes_extra_in_flight else (0,))
    if is_defined(name, p, m, extra)
]


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


def broken(table, rank, **change):
    """The table with one edit on one rank."""
    copy = [list(actions) for actions in table]
    if "drop" in change:
        copy[rank].remove(change["drop"])
    if "double" in change:
        copy[rank].append(change["double"])
    for pair in change.get("swap", ()):
        i, j = (copy[rank].index(a) for a in pair)
        copy[rank][i], copy[rank][j] = copy[rank][j], copy[rank][i]
    if "move_to_rank" in change:
        action, other = change["move_to_rank"]
        copy[rank].remove(action)
        copy[other].append(action)
    for action, before in change.get("move", ()):
        copy[rank].remove(action)
        copy[rank].insert(copy[rank].index(before), action)
    return copy


def a(text):
    return parse_action(text)


@pytest.mark.parametrize(
    ("name", "rule", "rank", "change"),
    [
        ("2bw", "complete", 1, {"drop": a("1S3")}),
        ("2bw", "complete", 1, {"double": a("1S3")}),
        ("zb_h1", "complete", 1, {"drop": a("1W1.1")}),
        ("2bw", "placed", 1, {"move_to_rank": (a("1S3"), 0)}),
        ("2bw", "ordered", 1, {"swap": [(a("1F1.0"), a("1B1.0"))]}),
        ("2bw", "ordered", 0, {"swap": [(a("0N1"), a("0B1.1"))]}),
        ("zb_h1", "ordered", 0, {"swap": [(a("0I1.0"), a("0W1.0"))]}),
        ("zb_h1", "ordered", 1, {"swap": [(a("1W1.1"), a("1N1"))]}),
        ("2bw", "versioned", 1, {"swap": [(a("1S0"), a("1F2.0"))]}),
        ("2bw", "fits", 1, {"move": [(a("1F1.1"), a("1B1.0"))]}),
        ("2bw", "fifo", 1, {"swap": [(a("1F2.0"), a("1F2.1")), (a("1B2.0"), a("1B2.1"))]}),
        ("interleaved_1f1b", "fifo", 1, {"swap": [(a("1F1.3"), a("3F1.2"))]}),
    ],
)
def test_broken_tables_are_noticed(name, rule, rank, change):
    m = 4 if name == "interleaved_1f1b" else 2
    schedule = build(name, 2, m)
    table = unroll_all(schedule, num_steps=4)
    check_table(schedule, table, steps=range(4))
    with pytest.raises(ScheduleError, match=f"^{rule}"):
        check_table(schedule, broken(table, rank, **change), steps=range(4))


def test_a_step_over_a_version_in_use_is_noticed():
    """A STEP one batch early writes into the slot that batches in flight still use."""
    schedule = build("2bw", 2, 2)
    early = replace(schedule, delay=(0, 0))  # one slot, and the stream of 2bw
    with pytest.raises(ScheduleError, match="^(ordered|versioned|fits)"):
        check(early)
    # versions by the table, slots too few
    table = unroll_all(schedule, num_steps=4)
    few = replace(schedule, in_flight=(9, 9))

    class OneSlot(type(few)):
        num_versions = (1, 1)

    fields = {name: getattr(few, name) for name in few.__dataclass_fields__}
    with pytest.raises(ScheduleError, match="^fits: .* writes over version"):
        check_table(OneSlot(**fields), table, steps=range(4))


def test_a_wrong_delay_is_noticed():
    """The stream of 2bw claiming delay 0 would need a version that is made only later."""
    schedule = replace(build("2bw", 2, 2), delay=(0, 0))
    with pytest.raises(ScheduleError, match="ordered|versioned"):
        check(schedule)


def test_a_deadlock_is_noticed():
    """Rank 1 wants the second step's input before it has answered the first."""
    schedule = replace(build("1f1b", 2, 1), delay=(0, 1), in_flight=(1, 2))
    table = [
        [a("0F0.0"), a("0B0.0"), a("0N0"), a("0S0"), a("0F1.0"), a("0B1.0"), a("0N1"), a("0S1")],
        [a("1F0.0"), a("1F1.0"), a("1B0.0"), a("1N0"), a("1S0"), a("1B1.0"), a("1N1"), a("1S1")],
    ]
    with pytest.raises(ScheduleError, match="^live: deadlock, rank 0 at 0B0.0, rank 1 at 1F1.0"):
        check_table(schedule, table, steps=range(2))


def test_errors_show_the_place():
    schedule = build("2bw", 2, 2)
    table = broken(unroll_all(schedule, num_steps=4), 1, swap=[(a("1F1.0"), a("1B1.0"))])
    with pytest.raises(ScheduleError, match="<-- here"):
        check_table(schedule, table, steps=range(4))


def test_bubble_of_spans_counts_what_the_contract_says():
    """From the first F of one step to the last action of another; only F, B, I and W are busy."""
    for name in ("1f1b", "zb_h1"):
        schedule = build(name, 2, 2)
        spans = simulate(schedule, num_steps=5, costs=Costs(1, 2, step=1))
        # 1f1b: a step is 3 microbatches of 3 units and the optimizer's one; zb_h1 saves two units of the third
        period = {"1f1b": 10, "zb_h1": 8}[name]
        assert bubble_of(spans, num_ranks=2, first_step=1, last_step=3) == pytest.approx(1 - 6 / period)


@pytest.mark.parametrize("name", SCHEDULES)
def test_pictures_show_every_action(name):
    cases = [case for case in LEGAL if case[0] == name and case[1] in (1, 2, 4) and case[2] in (1, 2, 4, 8)]
    for case in cases:
        check_pictures(build(*case))


def check_pictures(schedule):
    spans = simulate(schedule, num_steps=2, costs=Costs(step=1), overlap=True)
    root = ET.fromstring(render_svg(spans, title="a < b", unit="forwards"))
    assert root.tag.endswith("svg")
    titles = {e.text.split(":")[0] for e in root.iter() if e.tag.endswith("title")}
    assert titles == {str(s.action) for s in spans if s.end > s.start} | {"a < b"}
    rows = render_text(schedule, num_steps=2).splitlines()
    assert len(rows) == schedule.num_ranks
    for rank, row in enumerate(rows):
        computed = [s for s in spans if s.rank == rank and s.action.op in COMPUTE_OPS]
        drawn = [cell for cell in row.split("|")[1].split() if cell not in (".", "---")]
        assert [cell[:3] for cell in drawn] == [
            f"{s.action.op.value}{s.action.step}{chr(ord('a') + s.action.microbatch)}" for s in computed
        ]
        assert [cell.count("'") for cell in drawn] == [s.action.stage // schedule.num_ranks for s in computed]


def test_background_work_is_drawn_in_a_strip_below():
    schedule = build("2bw", 2, 2)
    with_strip, without = (
        render_svg(simulate(schedule, num_steps=3, costs=Costs(step=1), overlap=o), title="t", unit="u")
        for o in (True, False)
    )
    assert "background" in with_strip
    assert "background" not in without


@pytest.mark.parametrize("text", ["2F5.0", "0B1.3", "1N7", "3S2", "4I0.2", "0W11.1", "7R3", "0R4"])
def test_actions_are_read_back(text):
    assert str(parse_action(text)) == text


def test_a_bad_action_is_refused():
    with pytest.raises(ValueError, match="expected a form like"):
        parse_action("F2")
