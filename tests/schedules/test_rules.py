"""The checker notices every kind of broken table, and says where."""

from dataclasses import replace

import pytest

from megaasync.schedules import (
    ScheduleError,
    check,
    check_table,
    parse_action,
    unroll_all,
)
from tests.support.tables import build


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
