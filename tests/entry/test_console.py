"""What the console, a long TMPDIR, locks and sockets do to a run: nothing."""

import errno
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from megaasync.distributed.environment import launched_environment
from megaasync.entry.file_errors import explain_file_error
from megaasync.entry.private_folder import remove_orphans
from tests.support.cli import TINY, command, environment, metrics, pretrain, summary
from tests.support.tiers import slow_params

TWO = [*TINY, "parallel.pipeline=2", "model.num_layers=2", "checkpoint.interval=null", "run.dir=run"]


@pytest.mark.parametrize(
    "shell",
    slow_params(
        [
            'exec "$@" > /dev/full',
            'exec "$@" <&- >&- 2>&-',
            '"$@" | head -c 1 > /dev/null; exit ${PIPESTATUS[0]}',
        ],
        kept=(0, 1),
        area="survive",
    ),
    ids=["full", "closed", "reader left"],
)
def test_a_console_that_cannot_be_written_ends_no_run(tmp_path, shell):
    words = command(*TWO, "train.steps=3", "logging.interval=1", "checkpoint.interval=2")
    ran = subprocess.run(
        ["bash", "-c", shell, "bash", *words],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=90,
    )
    assert ran.returncode == 0 and ran.stderr == ""
    assert summary(tmp_path / "run")["status"] == "completed" and len(metrics(tmp_path / "run")) == 3
    assert summary(tmp_path / "run")["checkpoint_step"] == 3


def test_letters_that_the_consoles_encoding_lacks_end_no_run(tmp_path):
    ran = pretrain(*TWO, "train.steps=1", "run.dir='l\u00e4uft'", cwd=tmp_path, PYTHONIOENCODING="ascii")
    assert ran.status == 0 and "report: " in ran.out, ran.err


def test_help_into_head_is_quiet(tmp_path):
    ran = subprocess.run(
        ["bash", "-c", '"$@" --help | head -2', "bash", *command()],
        cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert ran.stderr == "" and len(ran.stdout.splitlines()) == 2


@pytest.mark.parametrize("words", ["--help", "--cfg job", "dry_run=true"])
def test_an_answer_that_cannot_be_written_is_a_failure(tmp_path, words):
    """It was all that was asked for; a run that goes on is another matter."""
    ran = subprocess.run(
        ["bash", "-c", f'"$@" {words} > /dev/full', "bash", *command(*TINY)],
        cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert ran.returncode == 1 and "the output cannot be written" in ran.stderr


def test_a_long_tmpdir_is_not_used_for_sockets(tmp_path):
    long = tmp_path / "local_scratch/slurm/job_48291734.gpu-prod/user.project-pretrain/tmp/very/deep"
    long.mkdir(parents=True)
    ran = pretrain(*TWO, "train.steps=2", cwd=tmp_path, TMPDIR=str(long))
    assert ran.status == 0 and ran.err == "", ran.err
    assert not list(long.iterdir())


@pytest.fixture
def short_folder():
    """A folder for temporary files that nobody else uses, with a path short enough for sockets."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        yield Path(folder)


@pytest.mark.parametrize("whom", slow_params(["launcher", "all"], kept=(0,), area="survive"))
def test_a_killed_run_leaves_no_sockets_behind(tmp_path, short_folder, whom):
    """The ranks remove the folder of a launcher that was killed; of a run killed as a whole, the next one does."""
    process = subprocess.Popen(
        command(*TWO, "train.steps=100000"), cwd=tmp_path, env=environment(TMPDIR=str(short_folder)),
        start_new_session=True, stdout=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        deadline = time.monotonic() + 60
        while not (tmp_path / "run/metrics.jsonl").exists() or not metrics(tmp_path / "run"):
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.1)
        (own,) = (path for path in short_folder.glob("megaasync-*") if (path / "alive").exists())
        assert own.stat().st_mode & 0o777 == 0o700
    finally:
        (process.kill if whom == "launcher" else lambda: os.killpg(process.pid, signal.SIGKILL))()
        process.wait()
    if whom == "all":
        deadline = time.monotonic() + 10
        while own.exists() and time.monotonic() < deadline:
            remove_orphans(short_folder)
            time.sleep(0.1)
    while own.exists() and time.monotonic() < deadline + 60:
        time.sleep(0.1)
    assert not own.exists()


def test_ranks_of_one_host_listen_on_the_loopback_only(tmp_path):
    process = subprocess.Popen(
        command(*TWO, "train.steps=100000"), cwd=tmp_path, env=environment(), start_new_session=True,
        stdout=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        deadline = time.monotonic() + 60
        while not (tmp_path / "run/metrics.jsonl").exists() or not metrics(tmp_path / "run"):
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.1)
        members = {int(p.name) for p in Path("/proc").glob("[0-9]*") if _group_of(p) == process.pid}
        found = [address for pid in members for address in _listening(pid)]
        assert found, "no listening socket was found: the test looks at nothing"
        assert {address for address in found if address != "0100007F"} == set()
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _group_of(process: Path) -> int:
    try:
        return os.getpgid(int(process.name))
    except ProcessLookupError:
        return -1


def _listening(pid: int) -> list[str]:
    """Local addresses, as /proc/net/tcp writes them, of a process's listening TCP sockets."""
    inodes = set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        try:
            match = re.fullmatch(r"socket:\[(\d+)\]", os.readlink(link))
        except OSError:
            continue
        inodes |= {match.group(1)} if match else set()
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                found.append(fields[1].partition(":")[0])
    return found


@pytest.mark.parametrize(
    ("number", "name", "words"),
    [
        (
            errno.ENOSPC,
            "/x/checkpoints/.step_00000004.writing/__0_0.distcp",
            ["a checkpoint", "make room", "run.dir"],
        ),
        (errno.ENOSPC, "/x/run/metrics.jsonl", ["of the run folder", "make room", "run.dir"]),
        (errno.EACCES, "/c/tokens-0123456789abcdef0123/train.bin", ["of the data cache", "right", "data.cache_dir"]),
        (errno.EACCES, "/data/x.idx", ["of the token files", "right", "data.path"]),
        (errno.ENOENT, "/tmp/megaasync-abc/store", ["for the ranks to meet", "renamed or removed", "TMPDIR"]),
        (errno.EMFILE, None, ["ulimit -n"]),
        (errno.EIO, "/elsewhere/file", ["/elsewhere/file", "disk or file system is at fault"]),
    ],
)
def test_what_is_said_about_a_file_fits_the_file(number, name, words):
    said = explain_file_error(OSError(number, os.strerror(number), name))
    assert all(word in said for word in words), said
    if "run.dir" not in words:
        assert "run.dir" not in said


def test_a_socket_path_that_is_too_long_speaks_of_tmpdir():
    assert "TMPDIR" in explain_file_error(OSError("AF_UNIX path too long"))


MPI = {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
       "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}  # fmt: skip


def place(monkeypatch, **variables):
    for name in ("RANK", "WORLD_SIZE", "SLURM_STEP_NUM_TASKS", "MASTER_ADDR", "MASTER_PORT", *MPI):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    return launched_environment()


def test_places_that_mpirun_gives(monkeypatch):
    meet = {"MASTER_ADDR": "::1", "MASTER_PORT": "29500"}
    found = place(monkeypatch, **MPI, **meet)
    assert (found.rank, found.world_size, found.local_rank, found.local_world_size) == (3, 4, 1, 2)
    assert found.init_method == "tcp://[::1]:29500"
    pmi = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "1"}
    assert place(monkeypatch, **pmi, MASTER_ADDR="h", MASTER_PORT="1").local_world_size == 1
    for name in pmi:
        monkeypatch.delenv(name)
    assert place(monkeypatch, **{**MPI, "OMPI_COMM_WORLD_SIZE": "1"}, **meet) is None
    with pytest.raises(Exception, match=r"OMPI_COMM_WORLD_SIZE=4: started by mpirun, but MASTER_ADDR and MASTER_PORT"):
        place(monkeypatch, **MPI)


@pytest.mark.slow("cluster")
def test_two_ranks_meet_at_an_ipv6_address_from_mpirun(tmp_path):
    """One training of two ranks, not two trainings."""
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "megaasync.pretrain", *TWO, "train.steps=3"],
            cwd=tmp_path,
            env=environment(
                OMPI_COMM_WORLD_SIZE="2", OMPI_COMM_WORLD_RANK=str(rank), OMPI_COMM_WORLD_LOCAL_RANK=str(rank),
                OMPI_COMM_WORLD_LOCAL_SIZE="2", MASTER_ADDR="::1", MASTER_PORT=str(20000 + os.getpid() % 9000),
            ),
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    said = [rank.communicate(timeout=90) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], said
    assert len(metrics(tmp_path / "run")) == 3 and len(metrics(tmp_path / "run", "start")) == 1
