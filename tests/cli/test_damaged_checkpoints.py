"""Checkpoints that are broken, changed, of another model or in the way: found before they are used."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from megaasync.checkpoint.paths import MARK, checkpoints_in
from tests.support.cli import command, environment, metrics, pretrain, small_disk, summary
from tests.support.long_runs import wait_for_step
from tests.support.restarts import RECIPE, numbers


def test_a_broken_newest_checkpoint_is_passed_over_and_named(tmp_path, with_two):
    newest = with_two / "step_00000008"
    (with_two / "notes.txt").write_text("mine")
    (with_two / "step_00000099").mkdir()  # never finished
    shard = max(newest.glob("*.distcp"), key=lambda path: path.stat().st_size)
    with shard.open("r+b") as file:
        file.truncate(100)
    listed = subprocess.run(
        [*command()[:1], "-m", "megaasync.checkpoint", "list", "run"],
        cwd=tmp_path, env=environment(), capture_output=True, text=True,
    )  # fmt: skip
    assert listed.returncode == 0 and "instead of" in listed.stdout and "did not finish" in listed.stdout
    ran = pretrain(*RECIPE, "train.steps=10", "run.dir=run", cwd=tmp_path)
    assert ran.status == 0, ran.err
    start_row = metrics(tmp_path / "run", "start")[-1]
    assert (start_row["step"], Path(start_row["checkpoint"]).name) == (4, "step_00000004")
    assert [row["step"] for row in metrics(tmp_path / "run")] == list(range(1, 11))
    assert (with_two / "notes.txt").read_text() == "mine"
    explicit = pretrain(
        *RECIPE, f"checkpoint.resume={with_two / 'abandoned_step_00000099'}", "run.dir=other", cwd=tmp_path
    )
    assert explicit.status == 2 and "has no COMPLETE.json: its save did not finish" in explicit.message
    assert not (tmp_path / "other").exists()


def test_verify_finds_a_changed_byte(tmp_path, with_two):
    def verify():
        return subprocess.run(
            [*command()[:1], "-m", "megaasync.checkpoint", "verify", "run"],
            cwd=tmp_path, env=environment(), capture_output=True, text=True,
        )  # fmt: skip

    assert verify().returncode == 0
    shard = next((with_two / "step_00000004").glob("*.distcp"))
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    told = verify()
    assert told.returncode == 1 and f"{shard.name} was changed after it was written" in told.stdout
    described = subprocess.run(
        [*command()[:1], "-m", "megaasync.checkpoint", "describe", "run"],
        cwd=tmp_path, env=environment(), capture_output=True, text=True,
    )  # fmt: skip
    assert described.returncode == 0 and "steps         8 of 8" in described.stdout


def test_a_checkpoint_of_another_model_is_refused_and_leaves_no_folder(tmp_path, with_two):
    ran = pretrain(
        *RECIPE,
        "model.hidden_size=32",
        f"checkpoint.resume={with_two / 'step_00000008'}",
        "run.dir=other",
        cwd=tmp_path,
    )
    assert ran.status == 2 and "model.hidden_size=32: the checkpoint" in ran.message, ran.err
    assert "Traceback" not in ran.err and not (tmp_path / "other").exists()


def test_a_complete_run_is_not_run_again(tmp_path, with_two):
    before = (tmp_path / "run" / "metrics.jsonl").read_text()
    ran = pretrain(*RECIPE, "train.steps=8", "run.dir=run", cwd=tmp_path)
    assert ran.status == 2 and "complete after 8 steps; set train.steps above that" in ran.message
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == before
    ran = pretrain(*RECIPE, "train.steps=8", "run.dir=run", "checkpoint.resume=never", cwd=tmp_path)
    assert ran.status == 2 and "holds a run already" in ran.message


def test_a_full_disk_costs_the_checkpoint_and_not_the_run(tmp_path):
    """The older checkpoint stays, the message says so, training goes on; but a run that ends unsaved has failed."""
    with small_disk(tmp_path, "8m") as disk:
        (disk / "run").mkdir()
        arguments = [*RECIPE, "model.hidden_size=64", "checkpoint.keep=1", f"run.dir={disk}/run"]
        ran = pretrain(*arguments, "train.steps=8", cwd=tmp_path)
        assert ran.status == 0, ran.err
        (found,) = checkpoints_in(disk / "run" / "checkpoints")
        room = shutil.disk_usage(disk).free
        (disk / "ballast").write_bytes(b"x" * (room - 600_000))
        ran = pretrain(*arguments, "train.steps=16", cwd=tmp_path)
        assert ran.status == 1, ran.err
        assert "the last checkpoint, of step 16, could not be saved" in ran.message
        assert "the newest one is of step 8" in ran.message and "Traceback" not in ran.err
        told = summary(disk / "run")
        assert told["status"] == "failed" and told["checkpoint_step"] == 8 and told["steps"] == 16 and told["val_loss"]
        assert len(metrics(disk / "run")) == 16
        assert "checkpoint at step 12 failed" in ran.out and "training goes on" in ran.out
        assert "needs" in ran.out and "MiB are free; make room" in ran.out
        assert str(found.path) in ran.out
        assert [item.step for item in checkpoints_in(disk / "run" / "checkpoints") if item.is_complete] == [8]
        assert not list((disk / "run" / "checkpoints").glob(".*"))


@pytest.mark.slow("survive")
def test_a_file_size_limit_in_the_middle_of_a_write_is_survived(tmp_path):
    """As a quota: some rank's write fails half way, all ranks hear of it."""
    arguments = [*RECIPE, "model.hidden_size=128", "model.ffn_hidden_size=512", "train.steps=6", "run.dir=run"]
    ran = subprocess.run(
        ["bash", "-c", 'ulimit -f 300; exec "$@"', "bash", *command(*arguments)],
        cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert ran.returncode == 1, ran.stderr
    assert summary(tmp_path / "run")["checkpoint_step"] is None
    assert "checkpoint at step 4 failed" in ran.stdout and "there is no checkpoint yet" in ran.stdout
    assert "a file could not be written whole; is the disk full, or a quota or file size limit" in ran.stdout
    assert checkpoints_in(tmp_path / "run" / "checkpoints") == []


@pytest.mark.slow("survive")
def test_a_second_start_waits_for_the_first_and_then_says_who_it_is(tmp_path, started):
    process = started(tmp_path, "train.steps=100000", "run.dir=run")
    wait_for_step(tmp_path / "run", 5, process)
    ran = pretrain(*RECIPE, "train.steps=100000", "run.dir=run", cwd=tmp_path)
    assert ran.status == 2 and f"process {process.pid} on" in ran.message and "works there" in ran.message
    assert 29 < ran.seconds < 45
    assert process.poll() is None


def test_a_mark_names_every_file(with_two):
    folder = with_two / "step_00000008"
    named = set(json.loads((folder / MARK).read_text())["files"])
    assert named == {path.name for path in folder.iterdir()} - {MARK}


def test_an_explicit_checkpoint_wins_over_a_newer_one(tmp_path, with_two):
    """FIELD_FAULTS 32. What the run had done after it is done again."""
    before = numbers(tmp_path / "run")
    ran = pretrain(
        *RECIPE, "train.steps=8", f"checkpoint.resume={with_two / 'step_00000004'}", "run.dir=run", cwd=tmp_path
    )
    assert ran.status == 0, ran.err
    assert metrics(tmp_path / "run", "start")[-1]["step"] == 4
    assert numbers(tmp_path / "run") == before
