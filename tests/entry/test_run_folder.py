"""Run folders are made once, whoever comes at the same time."""

import json
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import yaml

from megaasync.checkpoint import paths
from megaasync.checkpoint.run_lock import join_folder, lock_folder
from megaasync.config import Config, ConfigError, read, validate
from megaasync.entry import run_folder
from megaasync.entry.run_folder import ClaimedFolder, claim_run_folder, release_run_folder
from megaasync.entry.spawn import RankFailed
from megaasync.observe import run_files
from megaasync.observe.run_files import FolderLost, MetricsFile
from tests.support.configs import plain_config, small_config


def claim(run_dir, label="x", data=None, **overrides):
    """The claim of a small run on a folder."""
    plain = plain_config(run__dir=None if run_dir is None else str(run_dir), checkpoint__interval=5, **overrides)
    plain["checkpoint"]["resume"] = overrides.get("checkpoint__resume", "auto")
    return claim_run_folder(validate(read(Config, plain)), label=label, data=data or {}), plain


def begin(folder, rows=3, data=None, **overrides):
    """A run in a folder that was killed after so many rows, before its first checkpoint."""
    claimed, plain = claim(folder, data=data, **overrides)
    (claimed.folder / "config.yaml").write_text(yaml.safe_dump(plain))
    start = {"kind": "start", "step": 0, "checkpoint": None, "data": data or {}}
    lines = [start, *({"kind": "train", "step": step + 1, "loss": 1.0} for step in range(rows))]
    (claimed.folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    claimed.close()


def test_ten_runs_in_one_second_get_ten_folders(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with ThreadPoolExecutor(10) as pool:
        claims = list(pool.map(lambda _: claim(None)[0], range(10)))
    assert len({item.folder for item in claims}) == 10
    for item in claims:
        item.close()


def test_of_ten_runs_that_want_one_folder_one_gets_it(tmp_path, monkeypatch):
    monkeypatch.setattr(run_folder, "lock_folder", partial(lock_folder, wait=0.3))

    def attempt(_):
        try:
            return claim(tmp_path / "run")[0]
        except ConfigError as error:
            return str(error)

    with ThreadPoolExecutor(10) as pool:
        results = list(pool.map(attempt, range(10)))
    won = [result for result in results if not isinstance(result, str)]
    assert len(won) == 1
    assert sum(isinstance(result, str) and "works there" in result for result in results) == 9
    won[0].close()


def test_a_claim_is_released_only_if_the_run_never_began(tmp_path):
    first, _ = claim(tmp_path / "run")
    first.close()
    assert not first.folder.exists()
    begin(tmp_path / "run")
    (tmp_path / "run/notes.txt").write_text("mine")
    release_run_folder(tmp_path / "run")
    assert {"metrics.jsonl", "notes.txt", "config.yaml"} <= {path.name for path in (tmp_path / "run").iterdir()}
    with pytest.raises(ConfigError, match="holds a run already"):
        claim(tmp_path / "run", checkpoint__resume="never")


@pytest.mark.parametrize("left", ["", "config.yaml"])
def test_a_claim_that_a_kill_left_behind_is_taken(tmp_path, left):
    """Killed between claiming the folder and the first row: nothing was lost, and the same command starts."""
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "metrics.jsonl").touch()
    if left:
        (folder / left).write_text("model: {}\n")
    claimed, _ = claim(folder)
    assert claimed.resume is None and claimed.folder == folder
    claimed.close()


CHANGES = [
    {"schedule__name": "1f1b"},
    {"correction": {"name": "error_feedback"}},
    {"train__global_batch_size": 4},
    {"train__lr_schedule": "constant"},
    {"train__clip_grad_norm": None},
    {"train__steps": 21},
    {"train__dtype": "float32"},
    {"train__document_mask": False, "train__warmup_steps": 5},
    {"optimizer__lr": 0.5},
    {"model__init_std": 0.2},
    {"data__branching": 4},
]


@pytest.mark.parametrize("change", CHANGES, ids=lambda c: next(iter(c)))
def test_another_run_does_not_take_the_rows_of_one_without_a_checkpoint(tmp_path, change):
    begin(tmp_path / "run")
    before = (tmp_path / "run/metrics.jsonl").read_bytes()
    with pytest.raises(ConfigError, match=r"holds a run already, another one.*begun with") as refused:
        claim(tmp_path / "run", **change)
    assert next(iter(change)).split("__")[-1] in str(refused.value) or "warmup" in str(refused.value)
    assert (tmp_path / "run/metrics.jsonl").read_bytes() == before


def test_the_same_run_begins_again_wherever_it_runs(tmp_path):
    begin(tmp_path / "run")
    same = {"train__time_limit": 50.0, "logging__interval": 3, "parallel__timeout_seconds": 7.0, "run__max_restarts": 2}
    claimed, _ = claim(tmp_path / "run", **same)
    assert claimed.resume is None
    claimed.close()


def test_other_tokens_under_the_same_name_are_another_run(tmp_path):
    begin(tmp_path / "run", data={"tokenizer": None, "train": "a" * 64, "validation": None})
    claim(tmp_path / "run", data={"tokenizer": None, "train": "a" * 64, "validation": None})[0].close()
    with pytest.raises(ConfigError, match="the training tokens are not those of the run in"):
        claim(tmp_path / "run", data={"tokenizer": None, "train": "b" * 64, "validation": None})


def test_a_restart_keeps_the_named_checkpoint_until_it_was_loaded(tmp_path):
    """A rank that dies before the named one is loaded must not send the run to a newer one."""
    root = tmp_path / "run/checkpoints"
    for step in (4, 6):
        tmp_dir = tmp_path / f"aside{step}"
        tmp_dir.mkdir()
        (tmp_dir / paths.META).write_text(json.dumps({"step": step}))
        root.mkdir(parents=True, exist_ok=True)
        name = paths.folder_name(step)
        paths.finish(tmp_dir, root / name, {paths.META: paths.checksum(tmp_dir / paths.META)})
    claimed = ClaimedFolder(tmp_path / "run", root / "step_00000004", lock_folder(tmp_path / "run"))
    claimed.begin_again()
    assert claimed.resume.name == "step_00000004"
    row = {"kind": "start", "step": 4, "checkpoint": str(root / "step_00000004")}
    (tmp_path / "run/metrics.jsonl").write_text(json.dumps(row) + "\n")
    claimed.begin_again()
    assert claimed.resume.name == "step_00000006"
    os.close(claimed.lock)


def test_a_run_without_checkpoints_is_never_begun_again(tmp_path):
    begin(tmp_path / "run")
    plain = plain_config(run__dir=str(tmp_path / "run"), checkpoint__resume="auto")
    with pytest.raises(ConfigError, match="checkpoint.interval=null makes no checkpoint"):
        claim_run_folder(validate(read(Config, plain)), label="x", data={})


@pytest.mark.parametrize("name", ["file", "file/below"])
def test_a_file_is_no_run_folder(tmp_path, name):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"run\.dir=.*file.*: is a file, or lies in one"):
        claim(tmp_path / name)


def test_a_run_notices_that_its_folder_was_moved_or_removed(tmp_path, monkeypatch):
    monkeypatch.setattr(run_files, "_LOOK_SECONDS", 0.0)
    for end, words in (("moved", r"renamed to .*/moved while .* run\.dir=.*/moved"), (None, "was removed")):
        folder = tmp_path / "run"
        folder.mkdir()
        metrics = MetricsFile(folder / "metrics.jsonl")
        metrics.write({"kind": "train", "step": 1})
        if end:
            folder.rename(tmp_path / end)
            folder.mkdir()  # another run takes the name: its folder is left alone
        else:
            shutil.rmtree(folder)
        with pytest.raises(FolderLost, match=words):
            metrics.write({"kind": "train", "step": 2})
        metrics.close()
        if end:
            assert not list(folder.iterdir())
            folder.rmdir()


def test_a_folder_is_held_by_one_and_by_its_ranks(tmp_path):
    """A second holder waits, then says who the first one is; ranks whose launcher is gone hold it too."""
    first = lock_folder(tmp_path)
    with pytest.raises(ConfigError, match=rf"process {os.getpid()} on .* works there; wait for its end"):
        lock_folder(tmp_path, wait=0.3)
    rank = join_folder(tmp_path)
    os.close(first)
    with pytest.raises(ConfigError, match="ranks of a run that has ended still work there"):
        lock_folder(tmp_path, wait=0.3)
    os.close(rank)
    os.close(lock_folder(tmp_path, wait=0.3))


def test_restarts_of_ranks_are_counted_from_the_last_progress(tmp_path, monkeypatch):
    """Pauses double while nothing newer is saved, and the count begins again when something is."""
    from megaasync import pretrain

    claimed, pauses, failures = claim(tmp_path / "run", run__max_restarts=2)[0], [], []
    progress = iter([2, 2, 4, 4, 4])  # steps on disk after each failure

    class Fake:
        folder, resume, step = claimed.folder, None, 0

        def begin_again(self):
            self.step = next(progress)

    def fail(*_, **__):
        failures.append(1)
        raise RankFailed("rank 0 died", is_user_error=False, is_retryable=True, details="")

    monkeypatch.setattr(pretrain, "spawn_ranks", fail)
    monkeypatch.setattr(pretrain.time, "sleep", pauses.append)
    config = small_config(run__max_restarts=2, checkpoint__interval=2)
    with pytest.raises(RankFailed):
        pretrain._run_here(config, None, Fake(), began=0.0)
    assert len(failures) == 5 and pauses == [1.0, 2.0, 1.0, 2.0]
    claimed.close()
