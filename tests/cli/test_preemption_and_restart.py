"""Runs that are killed, signalled or short of disk: nothing is lost, and what goes on is the same run."""

import json
import os
import random
import shutil
import signal
import time
from pathlib import Path

import pytest

from megaasync.checkpoint import dcp_io
from megaasync.checkpoint.paths import MARK, checkpoints_in, inspect_checkpoint, latest
from tests.support.cli import REPOSITORY, metrics, pretrain, summary
from tests.support.long_runs import ranks_of, wait_for_step
from tests.support.restarts import RECIPE, assert_same_end, numbers, tensors_of
from tests.support.tiers import slow_params


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    cwd = tmp_path_factory.mktemp("whole")
    ran = pretrain(*RECIPE, "train.steps=60", "run.dir=run", cwd=cwd)
    assert ran.status == 0, ran.err
    return cwd / "run"


def kill_in(moment, process, folder, chance):
    """SIGKILL everything of a run in its start, among its steps, or while it writes a checkpoint."""
    rows = len(metrics(folder)) if (folder / "metrics.jsonl").exists() else 0
    begun = rows and metrics(folder, "start")
    wanted = chance.randint(1, 3)
    deadline = time.monotonic() + 90
    if moment == "start":
        time.sleep(chance.uniform(0.1, 3.5))
    while moment != "start" and process.poll() is None and time.monotonic() < deadline:
        starts = metrics(folder, "start") if (folder / "metrics.jsonl").exists() else []
        is_on = len(starts) > len(begun or [])  # this start has come to its steps
        if moment == "step" and is_on and len(metrics(folder)) >= starts[-1]["step"] + wanted:
            time.sleep(chance.uniform(0, 0.05))
            break
        if moment == "save" and is_on and list((folder / "checkpoints").glob(".step_*.writing")):
            time.sleep(chance.uniform(0, 0.02))
            break
        time.sleep(0.002)
    assert process.poll() is None, process.communicate()
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


@pytest.mark.slow("survive")
@pytest.mark.parametrize("kills", [3, 20])
def test_a_run_killed_again_and_again_ends_as_if_nothing_had_been(tmp_path, started, uninterrupted, kills):
    """SIGKILL of everything at random moments, start-up and saves included; bit for bit, no sample lost or twice."""
    chance, folder = random.Random(kills), tmp_path / "run"
    moments = ["step", "save", "start"] + [chance.choice(["start", "step", "save"]) for _ in range(kills - 3)]
    for moment in moments:
        kill_in(moment, started(tmp_path, "train.steps=60", "run.dir=run"), folder, chance)
    _, err = started(tmp_path, "train.steps=60", "run.dir=run").communicate(timeout=180)
    if "complete after 60 steps" not in err:
        assert err == "", err
    assert_same_end(folder, uninterrupted)
    begun = metrics(folder, "start")
    assert len(begun) > 1 + moments.count("save"), "no kill came after the first step"
    assert all(row["checkpoint"] is None or Path(row["checkpoint"]).name == f"step_{row['step']:08d}" for row in begun)


SIGNALS = [
    (n, to) for n in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2) for to in ("launcher", "all", "rank", "twice")
]


@pytest.mark.parametrize(("number", "to"), slow_params(SIGNALS, kept=(6,), area="survive"), ids=str)
def test_a_signal_saves_and_the_run_goes_on_exactly(tmp_path, started, uninterrupted, number, to):
    process = started(tmp_path, "train.steps=60", "checkpoint.interval=1000", "run.dir=run")
    wait_for_step(tmp_path / "run", 3, process)
    at = time.monotonic()
    if to == "rank":
        os.kill(ranks_of(process)[-1], number)
    elif to == "all":
        os.killpg(process.pid, number)
    else:
        for _ in range(2 if to == "twice" else 1):
            os.kill(process.pid, number)
    _, err = process.communicate(timeout=60)
    assert time.monotonic() - at < 30
    assert process.returncode == 130 and "Traceback" not in err, err
    steps = len(metrics(tmp_path / "run"))
    assert summary(tmp_path / "run")["status"] == "interrupted"
    (found,) = checkpoints_in(tmp_path / "run" / "checkpoints")
    assert (found.step, found.is_complete) == (steps, True)
    ran = pretrain(*RECIPE, "train.steps=60", "run.dir=run", cwd=tmp_path)
    assert ran.status == 0, ran.err
    assert_same_end(tmp_path / "run", uninterrupted)


@pytest.mark.slow("survive")
def test_a_time_limit_saves_before_it_is_reached(tmp_path):
    began = time.time()
    ran = pretrain(*RECIPE, "train.steps=100000", "train.time_limit=15", "run.dir=run", cwd=tmp_path)
    assert ran.status == 130, ran.err
    (found,) = checkpoints_in(tmp_path / "run" / "checkpoints")[-1:]
    python_and_hydra = 5  # come before the clock
    assert 5 < (found.path / MARK).stat().st_mtime - began < 15 + python_and_hydra
    assert found.is_complete and found.step == len(metrics(tmp_path / "run"))


@pytest.mark.slow("survive")
def test_a_run_begun_from_anothers_checkpoint_goes_on_from_its_own(tmp_path, with_two):
    """The same command again, as a job that is queued again gives it; before its first checkpoint from the other's."""
    begun_from = with_two / "step_00000004"
    command = [*RECIPE, f"checkpoint.resume={begun_from}", "checkpoint.interval=1000", "run.dir=other"]
    for steps, expected in ((6, 4), (8, 6)):
        ran = pretrain(*command, f"train.steps={steps}", cwd=tmp_path)
        assert ran.status == 0, ran.err
        assert metrics(tmp_path / "other", "start")[-1]["step"] == expected
    assert numbers(tmp_path / "other") == numbers(tmp_path / "run")[4:]
    shutil.rmtree(tmp_path / "other" / "checkpoints")
    ran = pretrain(*command, "train.steps=8", "checkpoint.resume=auto", cwd=tmp_path)
    assert ran.status == 0, ran.err
    first, *_, last = ({**row, "time": None} for row in metrics(tmp_path / "other", "start"))
    assert last == first
    shutil.rmtree(tmp_path / "other" / "checkpoints")
    shutil.rmtree(begun_from)
    ran = pretrain(*RECIPE, "run.dir=other", "train.steps=8", cwd=tmp_path)
    assert ran.status == 2 and f"was begun from {begun_from}, which is no longer whole" in ran.message


def test_a_refused_resume_touches_nothing(tmp_path, with_two):
    def content():
        return {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}

    before = content()
    ran = pretrain(*RECIPE, "train.steps=12", "optimizer.lr=0.5", "run.dir=run", cwd=tmp_path)
    assert ran.status == 2 and "optimizer.lr=0.5: the checkpoint" in ran.message and "optimizer.lr=0.004" in ran.message
    ran = pretrain(*RECIPE, "checkpoint.resume=elsewhere", "run.dir=run", cwd=tmp_path)
    assert ran.status == 2 and "no such folder" in ran.message
    assert {name: text for name, text in content().items() if ".lock" not in name.name} == {
        name: text for name, text in before.items() if ".lock" not in name.name
    }


def test_a_changed_byte_is_found_before_it_is_used(tmp_path, with_two):
    shard = next((with_two / "step_00000008").glob("*.distcp"))
    changed = bytearray(shard.read_bytes())
    changed[len(changed) // 2] ^= 1
    shard.write_bytes(changed)
    before = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    requested = f"checkpoint.resume={with_two / 'step_00000008'}"
    ran = pretrain(*RECIPE, "train.steps=12", "run.dir=run", requested, cwd=tmp_path)
    assert ran.status == 2 and f"{shard.name} was changed after it was written" in ran.message, ran.err
    assert "checkpoint.resume=FOLDER" in ran.message and "Traceback" not in ran.err
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == before, "rows went before the checksums were looked at"
    expected = numbers(tmp_path / "run")
    ran = pretrain(*RECIPE, "train.steps=8", "run.dir=run", cwd=tmp_path)
    assert ran.status == 0, ran.err
    assert f"WARNING: checkpoint {shard.parent}: {shard.name} was changed" in ran.err
    assert "renamed to damaged_step_00000008" in ran.err and "goes on from" in ran.err
    assert metrics(tmp_path / "run", "start")[-1]["step"] == 4 and numbers(tmp_path / "run") == expected
    (with_two / "step_00000004" / MARK).unlink()
    shard = next((with_two / "step_00000008").glob("*.distcp"))
    shard.write_bytes(changed[: shard.stat().st_size].ljust(shard.stat().st_size))
    ran = pretrain(*RECIPE, "train.steps=12", "run.dir=run", cwd=tmp_path)
    assert ran.status == 2 and "there is no older one" in ran.message, ran.err


@pytest.mark.parametrize("name", ["megaasync.json", MARK])
def test_a_changed_byte_of_a_checkpoints_json_is_found_before_it_is_used(tmp_path, with_two, name):
    """At every place of a few: a key, a number, a brace."""
    path = with_two / "step_00000008" / name
    whole = path.read_bytes()
    for place in (3, len(whole) // 3, len(whole) // 2, len(whole) - 4):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        found = inspect_checkpoint(path.parent)
        assert not found.is_complete and (name in found.problem or "its save did not finish" in found.problem)
        assert latest(with_two).step == 4
    path.write_bytes(whole)
    assert inspect_checkpoint(path.parent).is_complete
    renamed = path.parent.rename(with_two / "step_00000900")
    assert inspect_checkpoint(renamed).problem == "is a checkpoint of step 8 under another name"


def test_a_mark_that_names_files_elsewhere_is_not_followed(tmp_path, with_two):
    mark = with_two / "step_00000008" / MARK
    for name in ("/dev/zero", "../notes", "sub/file"):
        content = json.loads(mark.read_text())
        content["files"][name] = {"size": 0, "crc32": 0}
        del content["crc32"]
        mark.with_name("other").write_text(json.dumps(content))
        shutil.copytree(with_two / "step_00000008", with_two / "copy")
        (with_two / "copy/other").rename(with_two / "copy" / MARK)
        assert "was changed" in inspect_checkpoint(with_two / "copy").problem
        shutil.rmtree(with_two / "copy")


@pytest.mark.slow("survive")
def test_rows_that_somebody_removed_are_missed_and_the_run_goes_on(tmp_path, with_two):
    """The checkpoints say where the run is; its new ones are kept, and nothing begins at 0."""
    whole = numbers(tmp_path / "run")
    (tmp_path / "run" / "metrics.jsonl").unlink()
    (tmp_path / "run" / "summary.json").unlink()
    ran = pretrain(*RECIPE, "train.steps=12", "run.dir=run", cwd=tmp_path)
    assert ran.status == 0, ran.err
    assert "metrics.jsonl has no rows, but the checkpoint is of step 8: the rows between are lost" in ran.out
    assert [row["step"] for row in metrics(tmp_path / "run")] == [9, 10, 11, 12]
    assert [item.step for item in checkpoints_in(with_two)] == [8, 12] and len(whole) == 8
    ran = pretrain(*RECIPE, "train.steps=12", "run.dir=run", "checkpoint.resume=never", cwd=tmp_path)
    assert ran.status == 2 and "holds a run already" in ran.message


@pytest.mark.slow("survive")
def test_two_names_of_one_folder(tmp_path, with_two):
    """run.dir through a link, the checkpoint by its real path or with dots; and a home folder."""
    (tmp_path / "link").symlink_to(tmp_path / "run")
    real = f"checkpoint.resume={with_two / 'step_00000004'}"
    ran = pretrain(*RECIPE, "train.steps=6", "run.dir=link", real, cwd=tmp_path)
    assert ran.status == 0, ran.err
    dots = f"checkpoint.resume={with_two / '../checkpoints/step_00000006'}"
    ran = pretrain(*RECIPE, "train.steps=7", "run.dir=~/../run", dots, cwd=tmp_path, HOME=str(tmp_path / "link"))
    assert ran.status == 0, ran.err
    assert [row["step"] for row in metrics(tmp_path / "run", "start")] == [0, 4, 6]


def test_no_requeue_without_progress_on_disk(tmp_path):
    """Every save fails, as on a full disk: at the time limit the job is not queued again, for ever."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "checkpoints").write_text("a file in the place of the folder")
    ran = pretrain(*RECIPE, "train.steps=100000", "train.time_limit=8", "run.dir=run", cwd=tmp_path)
    assert ran.status == 1 and "could not be saved" in ran.message and "there is none" in ran.message, ran.err
    assert not (tmp_path / "run" / ".requeue").exists()
    assert summary(tmp_path / "run")["checkpoint_step"] is None


def test_newer_checkpoints_of_a_way_not_taken_are_set_aside(tmp_path, with_two):
    older = with_two / "step_00000004"
    arguments = ["train.steps=7", "checkpoint.interval=2", "run.dir=run"]
    ran = pretrain(*RECIPE, *arguments, f"checkpoint.resume={older}", cwd=tmp_path)
    assert ran.status == 0, ran.err
    assert {path.name for path in with_two.iterdir()} == {
        "abandoned_step_00000008",
        "step_00000006",
        "step_00000007",
    }


def test_files_are_as_large_as_what_is_in_them(with_two):
    """FIELD_FAULTS 30: a view must not be written with the whole buffer that it looks into."""
    folder = with_two / "step_00000008"
    content = sum(tensor.nbytes for tensor in tensors_of(folder).values())
    headers = 1500  # of torch's file format, for every piece
    pieces = sum(
        len(item.chunks) for item in dcp_io.dcp.FileSystemReader(folder).read_metadata().state_dict_metadata.values()
    )
    written = sum(path.stat().st_size for path in folder.glob("*.distcp"))
    assert content < written < 1.1 * content + headers * pieces


@pytest.mark.parametrize("way", slow_params(["renamed", "removed"], kept=(1,), area="survive"))
def test_a_run_whose_folder_is_taken_away_ends_and_says_where_it_is(tmp_path, started, way):
    process = started(tmp_path, "train.steps=100000", "run.dir=run", "checkpoint.interval=100000")
    wait_for_step(tmp_path / "run", 5, process)
    if way == "renamed":
        (tmp_path / "run").rename(tmp_path / "elsewhere")
    else:
        shutil.rmtree(tmp_path / "run")
    _, err = process.communicate(timeout=60)
    assert process.returncode == 2 and "Traceback" not in err, err
    words = f"was renamed to {tmp_path}/elsewhere" if way == "renamed" else "was removed"
    assert words in err.strip().splitlines()[-1]
    assert not (tmp_path / "run").exists(), "the run made the old name again"


@pytest.mark.slow("survive")
def test_a_run_on_a_file_system_without_locks(tmp_path):
    """Corpus, run folder and ranks: nothing needs flock."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site/sitecustomize.py").write_text(
        "import errno, fcntl\n"
        "def flock(*_):\n    raise OSError(errno.ENOLCK, 'No locks available')\n"
        "fcntl.flock = flock\n"
    )
    rows = (json.dumps({"text": f"row {n} " + "of a small corpus " * 20}) for n in range(200))
    (tmp_path / "d.jsonl").write_text("\n".join(rows))
    text = ["data=hf", "data.path=d.jsonl", "model.vocab_size=450", "train.steps=4", "run.dir=run"]
    recipe = [item for item in RECIPE if not item.startswith("data")]
    env = {"PYTHONPATH": f"{tmp_path}/site:{REPOSITORY}", "MEGAASYNC_CACHE": str(tmp_path / "cache")}
    for _ in range(2):
        ran = pretrain(*recipe, *text, cwd=tmp_path, **env)
        text[-2] = "train.steps=8"
    assert ran.status == 0, ran.err
    assert len(metrics(tmp_path / "run")) == 8
