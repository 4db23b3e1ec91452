"""Run folders are made once, whoever comes at the same time."""

import os
from concurrent.futures import ThreadPoolExecutor

import pytest

from megaasync.checkpoint.run_lock import join_folder, lock_folder
from megaasync.config import ConfigError
from megaasync.entry.run_folder import make_run_folder, release_run_folder


def test_ten_runs_in_one_second_get_ten_folders(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with ThreadPoolExecutor(10) as pool:
        folders = list(pool.map(lambda _: make_run_folder(None, label="x"), range(10)))
    assert len(set(folders)) == 10


def test_of_ten_runs_that_want_one_folder_one_gets_it(tmp_path):
    def claim(_):
        try:
            return make_run_folder(str(tmp_path / "run"), label="x")
        except ConfigError as error:
            return str(error)

    with ThreadPoolExecutor(10) as pool:
        results = list(pool.map(claim, range(10)))
    assert sum(not isinstance(result, str) for result in results) == 1
    assert sum(isinstance(result, str) and "holds a run already" in result for result in results) == 9


def test_a_claim_is_released_only_if_the_run_never_began(tmp_path):
    folder = make_run_folder(str(tmp_path / "run"), label="x")
    release_run_folder(folder)
    assert not folder.exists()
    folder = make_run_folder(str(tmp_path / "run"), label="x")
    (folder / "metrics.jsonl").write_text("{}\n")
    (folder / "notes.txt").write_text("mine")
    release_run_folder(folder)
    assert {path.name for path in folder.iterdir()} == {"metrics.jsonl", "notes.txt"}
    with pytest.raises(ConfigError, match="holds a run already"):
        make_run_folder(str(folder), label="x")


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
