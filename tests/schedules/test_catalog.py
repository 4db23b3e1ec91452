"""All schedules of the catalog: every rule holds at small sizes, other sizes are refused, each has what it needs."""

import doctest
import itertools
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pytest

import megaasync.schedules.action
from megaasync.schedules import (
    COMPUTE_OPS,
    SCHEDULES,
    Costs,
    Op,
    ScheduleError,
    check,
    schedule_metrics,
    simulate,
)
from tests.support.tables import LEGAL, SIZES, build, chunks_of, is_defined

MODULES = {name: import_module(kind.build.__module__) for name, kind in SCHEDULES.items()}


def test_every_module_has_one_schedule():
    folder = Path(megaasync.schedules.__file__).parent / "kinds"
    assert {path.stem for path in folder.glob("*.py")} - {"__init__"} == {
        module.__name__.rpartition(".")[2] for module in MODULES.values()
    }


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_has_its_picture_its_tests_and_its_yaml(name):
    """What one has to add to a new one; its doctest draws it."""
    result = doctest.testmod(MODULES[name])
    assert result.attempted > 0 and result.failed == 0
    own = MODULES[name].__name__.rpartition(".")[2]
    assert (Path(__file__).parent / "kinds" / f"test_{own}.py").exists(), f"no tests/schedules/kinds/test_{own}.py"
    assert (Path(__file__).parents[2] / "hydra_configs" / "schedule" / f"{name}.yaml").exists()


def test_actions_are_documented_as_they_are():
    result = doctest.testmod(megaasync.schedules.action)
    assert result.attempted > 0 and result.failed == 0


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("tied", [False, True])
def test_every_rule_holds(name, tied):
    cases = [case for case in LEGAL if case[0] == name]
    assert len(cases) > 5
    for _, p, m, virtual_stages, extra in cases:
        if tied and p > 1 and build(name, p, m, virtual_stages, extra).clip == "stage":
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
    for virtual_stages in {1, 2, 3} - set(chunks_of(name)):
        with pytest.raises(ScheduleError, match="stage.* per rank"):
            build(name, 2, 4, virtual_stages)
    if not kind.takes_extra_in_flight:
        with pytest.raises(ScheduleError, match="no extra forwards in flight"):
            build(name, 2, 1, extra=1)


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
