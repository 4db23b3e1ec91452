"""What the screen says while a run trains."""

import io
from types import SimpleNamespace

import pytest
from rich.console import Console

from megaasync.observe import progress, tracker
from megaasync.observe.progress import Progress, render_live_line
from megaasync.train.output import RunOutput
from tests.support.configs import small_config

ROW = {"kind": "train", "step": 95367, "loss": 10.12345, "lr": 1.234e-4, "grad_norm": 123.4567, "staleness": 1,
       "tokens_per_second": 1234567.8, "seconds": 12.3456}  # fmt: skip


@pytest.mark.parametrize("left", [None, 5.0, 36_000.0, 9e6])
@pytest.mark.parametrize("rate", [5.0, 1234.5, 98_765.4, 1.2e7])
def test_the_live_line_fits_80_columns(left, rate):
    line = render_live_line(ROW, steps=95368, rate=rate, seconds=12.3456, seconds_left=left)
    assert len(line) <= 79
    if left is not None:
        assert line.endswith({5.0: "left 0:05", 36_000.0: "left 10h00m", 9e6: "left 104d04h"}[left])


@pytest.fixture
def shown(monkeypatch):
    """(progress, what it printed); a clock that the test moves."""
    clock, out = [0.0], io.StringIO()
    monkeypatch.setattr(progress, "monotonic", lambda: clock[0])
    one = Progress(steps=40, interval=10)
    one._console = Console(file=out, soft_wrap=True, highlight=False, width=200)
    one._live = None
    return one, out, clock


def test_rates_are_of_the_steps_since_the_last_line_and_nothing_is_estimated_too_early(shown):
    one, out, clock = shown
    for step in range(1, 41):
        seconds = 1.0 if step <= 10 else 0.5
        clock[0] += seconds
        one.show({**ROW, "step": step, "seconds": seconds, "tokens_per_second": 100 / seconds})
    first, tenth, twentieth, thirtieth, last = out.getvalue().splitlines()
    assert "left" not in first and "100 tokens/s  1 s/step" in first
    assert "100 tokens/s  1 s/step" in tenth and "left 0:30" in tenth
    assert "200 tokens/s  0.5 s/step" in twentieth and "200 tokens/s" in thirtieth
    assert "left" not in last


def test_a_terminal_keeps_no_stale_line(monkeypatch):
    out = io.StringIO()
    monkeypatch.setattr(progress, "Console", lambda **_: Console(file=out, force_terminal=True, width=80))
    with Progress(steps=2, interval=1) as one:
        one.show({**ROW, "step": 1})
        one.show({**ROW, "step": 2})
    one.notify("completed after 2 steps")
    end = out.getvalue()
    assert "\x1b[2K" in end  # the line was erased
    assert end.rindex("completed") > end.rindex("loss")


def test_a_tracker_that_fails_is_told_of_when_it_happens_and_once(tmp_path, capsys):
    """As wandb without a login: days before the end of the run."""
    output = RunOutput(small_config(), tmp_path)
    output._tracker = SimpleNamespace(problem=None, log=lambda row: None, close=lambda: None)
    output.on_row({**ROW, "step": 1})
    output._tracker.problem = "api_key not configured (no-tty). call wandb.login(key=[your_api_key])"
    for step in (2, 3):
        output.on_row({**ROW, "step": step})
    output.__exit__(None, None, None)
    said = capsys.readouterr().out
    assert said.count("wandb: api_key not configured") == 1 and "training goes on" in said


def test_a_tracker_that_is_too_far_behind_says_so(monkeypatch, tmp_path):
    monkeypatch.setattr(tracker, "_QUEUE", 2)
    monkeypatch.setattr(tracker.WandbTracker, "_work", lambda self: None)  # it takes nothing
    one = tracker.WandbTracker(small_config().logging.wandb, folder=tmp_path, run_config={})
    for step in range(4):
        one.log({**ROW, "step": step})
    assert "rows behind" in one.problem
