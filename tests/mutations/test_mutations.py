"""Every fault of the table is noticed by the test that it names (slow, area engine); the table fits the code."""

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.mutations.faults import FAULTS

ROOT = Path(__file__).parents[2]


def test_every_fault_s_line_is_in_the_code_once():
    for fault in FAULTS:
        assert (ROOT / "megaasync" / fault.file).read_text().count(fault.old) == 1, f"{fault.file}: {fault.old}"
        assert (ROOT / shlex.split(fault.test)[0]).exists(), fault.test
    assert len({fault.name for fault in FAULTS}) == len(FAULTS) >= 30


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """A copy of everything that tests read, in which lines may be broken."""
    copy = tmp_path_factory.mktemp("mutated") / "tree"
    ignored = shutil.ignore_patterns(".git", ".venv", "runs", "__pycache__", "*.egg-info", "build")
    shutil.copytree(ROOT, copy, ignore=ignored)
    return copy


def fails(tree, test):
    """Whether a test fails in the copy; its output."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *shlex.split(test)],
        cwd=tree,
        # bytecode of a line that was broken for a second must not be found again
        env={**os.environ, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode in (0, 1), done.stdout + done.stderr  # 2 and above: no test was run
    return done.returncode == 1, done.stdout


@pytest.mark.slow("engine")
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_is_noticed(tree, fault):
    path = tree / "megaasync" / fault.file
    whole = path.read_text()
    path.write_text(whole.replace(fault.old, fault.new))
    try:
        failed, output = fails(tree, fault.test)
    finally:
        path.write_text(whole)
    assert failed, output
