"""Pictures of schedules, and the text form of actions."""

import xml.etree.ElementTree as ET

import pytest

from megaasync.schedules import (
    COMPUTE_OPS,
    SCHEDULES,
    Costs,
    bubble_of,
    parse_action,
    render_svg,
    render_text,
    simulate,
)
from tests.support.tables import LEGAL, build


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
