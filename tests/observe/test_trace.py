"""The measured timeline: pauses taken out, steps that were half forgotten left out, figures as the contract says."""

import json

import pytest

from megaasync.observe.report import Curve, render_curves, show
from megaasync.observe.run_files import MetricsFile, read_metrics
from megaasync.observe.trace import Recorder, Timeline, merge, write_chrome_trace
from megaasync.schedules import Costs, Op, Span, build_schedule, schedule_metrics, simulate


def spans_of(name="1f1b", steps=6, shift=0.0, costs=None):
    schedule = build_schedule(name, num_ranks=2, num_microbatches=2)
    spans = simulate(schedule, num_steps=steps, costs=costs or Costs(1, 2))
    return [Span(s.rank, s.action, s.start + shift, s.end + shift) for s in spans]


def by_rank(spans):
    return [[s for s in spans if s.rank == rank] for rank in (0, 1)]


def test_the_bubble_of_a_timeline_is_that_of_the_schedule():
    for costs in (Costs(1, 2), Costs(1, 2, step=1.5), Costs(1, 2, hop=0.2)):
        timeline = merge([(part, []) for part in by_rank(spans_of(steps=8, costs=costs))])
        schedule = build_schedule("1f1b", num_ranks=2, num_microbatches=2)
        assert timeline.bubble(num_steps=8) == pytest.approx(schedule_metrics(schedule, costs=costs).bubble, abs=0.02)


def test_evaluations_are_taken_out():
    """Steps 0-2, a pause of 100 that the ranks enter and leave at different times, steps 3-5."""
    plain = spans_of()
    cut = max(s.end for s in plain if s.action.step <= 2)
    moved = [Span(s.rank, s.action, s.start + 100 * (s.start >= cut), s.end + 100 * (s.start >= cut)) for s in plain]
    ranks = by_rank(moved)
    left = max(s.end for s in ranks[1] if s.action.step <= 2 and s.action.op is Op.B)
    timeline = merge([(ranks[0], [(cut, cut + 100)]), (ranks[1], [(left - 1, cut + 99.9)])])
    whole = merge([(part, []) for part in by_rank(plain)])
    assert timeline.bubble(num_steps=6) == pytest.approx(whole.bubble(num_steps=6))
    assert max(s.end for s in timeline.spans) == pytest.approx(max(s.end for s in whole.spans))


def test_a_recorder_that_forgot_the_first_actions_uses_whole_steps_only():
    first, second = by_rank(spans_of(steps=30))
    recent = [first[len(first) // 3 :], second[len(second) // 2 :]]
    timeline = Timeline(sorted((s for part in recent for s in part), key=lambda s: s.start), 2)
    assert timeline.bubble(num_steps=30) == pytest.approx(1 / 3)


@pytest.mark.parametrize("steps", [1, 2])
def test_too_short_a_run_has_no_bubble(steps):
    assert merge([(part, []) for part in by_rank(spans_of(steps=steps))]).bubble(num_steps=steps) is None


def test_the_recorder_is_bounded():
    recorder = Recorder(0, traced=False, synchronize=None, enabled=True)
    action = spans_of()[0].action
    for _ in range(30_000):
        recorder.add(action, 0.0)
    assert len(recorder.spans) == 20_000
    silent = Recorder(0, traced=False, synchronize=None, enabled=False)
    silent.add(action, 0.0)
    assert len(silent.spans) == 0


def test_chrome_trace(tmp_path):
    timeline = merge([(part, []) for part in by_rank(spans_of(shift=5.0))])
    write_chrome_trace(timeline, tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    complete = [e for e in events if e["ph"] == "X"]
    assert len(complete) == len(timeline.spans)
    assert min(e["ts"] for e in complete) == 0
    first_backward = next(e for e in complete if e["cat"] == Op.B.value)
    assert first_backward["dur"] == 2e6


def test_metrics_are_json_even_when_numbers_are_not(tmp_path):
    file = MetricsFile(tmp_path / "m.jsonl")
    file.write({"kind": "train", "loss": float("nan"), "grad_norm": float("inf"), "zero": 0.0})
    file.close()
    with open(tmp_path / "m.jsonl", "a") as half:
        half.write('{"kind": "tr')  # a run that was killed
    (row,) = read_metrics(tmp_path / "m.jsonl")
    assert row == {"kind": "train", "loss": "nan", "grad_norm": "inf", "zero": 0.0}


def test_curves_of_a_long_run_stay_small_and_keep_their_ends():
    points = [(i, float(i % 100)) for i in range(100_000)]
    drawing = render_curves([Curve("a", points), Curve("absent", [])], title="t", x_label="x", y_label="y")
    assert len(drawing) < 60_000
    assert "absent" not in drawing
    assert show(0) == "0" and show(0.0) == "0" and show(None) == "-"
