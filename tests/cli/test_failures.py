"""Runs that cannot go on: numbers that are not finite, a full disk, a bad member of a sweep."""

import pytest

from tests.support.cli import TINY, metrics, pretrain, small_disk, summary


def test_numbers_that_are_not_finite_end_the_run(tmp_path):
    ran = pretrain(
        *TINY,
        "parallel.pipeline=2",
        "optimizer=sgd",
        "optimizer.lr=1e30",
        "train.steps=50",
        "run.dir=run",
        cwd=tmp_path,
    )
    assert ran.status == 1
    assert "not both finite" in ran.message and "lower optimizer.lr" in ran.message
    assert "Traceback" not in ran.err
    assert summary(tmp_path / "run")["status"] == "failed"
    rows = metrics(tmp_path / "run")
    assert len(rows) < 50
    assert isinstance(rows[-1]["loss"], str) or isinstance(rows[-1]["grad_norm"], str)


def test_weights_ruined_by_the_last_updates_are_no_success(tmp_path):
    """Under 2bw the ruin of step 1 would show in the loss of step 3; a run of two steps must notice all the same."""
    arguments = [*TINY, "parallel.pipeline=2", "optimizer=sgd", "optimizer.lr=1e30", "train.steps=2", "run.dir=run"]
    ran = pretrain(*arguments, cwd=tmp_path)
    assert ran.status == 1
    assert "not usable" in ran.message and "optimizer.lr" in ran.message
    assert summary(tmp_path / "run")["status"] == "failed"


@pytest.mark.slow("survive")
def test_a_diverged_run_of_a_launched_rank_is_a_failure_too(tmp_path):
    place = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    arguments = [*TINY, "optimizer=sgd", "optimizer.lr=1e30", "train.steps=20", "run.dir=run"]
    ran = pretrain(*arguments, cwd=tmp_path, **place)
    assert ran.status == 1
    assert "not both finite" in ran.message and "Traceback" not in ran.err
    assert summary(tmp_path / "run")["status"] == "failed"


def test_a_bad_member_of_a_sweep_does_not_cost_the_others(tmp_path):
    ran = pretrain("-m", *TINY, "train.steps=1,-1,2", "run.dir=sweep", cwd=tmp_path)
    assert ran.status == 2
    assert "train.steps=-1: must be at least 1" in ran.err
    assert ran.message.startswith("error: these runs of the sweep failed: 1 (") and "train.steps=-1" in ran.message
    done = {path.name: summary(path)["steps"] for path in (tmp_path / "sweep").iterdir()}
    assert done == {"0": 1, "2": 2}
    assert [path.name for path in tmp_path.iterdir() if path.name not in "ab"] == ["sweep"]


def test_a_full_disk_is_one_message(tmp_path):
    with small_disk(tmp_path, "16k") as disk:
        ran = pretrain(*TINY, "train.steps=2000", f"run.dir={disk}/run", cwd=tmp_path)
        assert ran.status == 1, ran.err
        assert "No space left on device" in ran.message and str(disk) in ran.message
        assert "Traceback" not in ran.err
