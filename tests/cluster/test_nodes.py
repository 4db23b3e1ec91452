"""What SLURM's variables notify, in every form they have."""

import pytest

from megaasync.config import ConfigError
from megaasync.distributed import environment
from megaasync.distributed.slurm import expand_nodes, expand_tasks, port_of, rendezvous_endpoint

NODES = [
    ("n0", ["n0"]),
    ("a,b", ["a", "b"]),
    ("n[0-3]", ["n0", "n1", "n2", "n3"]),
    ("n[0,2]", ["n0", "n2"]),
    ("n[0-1,5,7-8]", ["n0", "n1", "n5", "n7", "n8"]),
    ("gpu[08-10]", ["gpu08", "gpu09", "gpu10"]),
    ("n[001-003,010]", ["n001", "n002", "n003", "n010"]),
    ("n[9-11]", ["n9", "n10", "n11"]),
    ("n[09-11]", ["n09", "n10", "n11"]),
    ("n[0-1]-ib", ["n0-ib", "n1-ib"]),
    ("a-b-c", ["a-b-c"]),
    ("rack-2-node-[1-2]", ["rack-2-node-1", "rack-2-node-2"]),
    ("r[1-2]n[01-02]", ["r1n01", "r1n02", "r2n01", "r2n02"]),
    ("login,gpu[1-2],cpu[03,05]-x,z", ["login", "gpu1", "gpu2", "cpu03-x", "cpu05-x", "z"]),
    ("h1.example.org,h[2-3].example.org", ["h1.example.org", "h2.example.org", "h3.example.org"]),
    ("n[5]", ["n5"]),
    ("n[098-101]", ["n098", "n099", "n100", "n101"]),
    ("10-0-1-[4-5]", ["10-0-1-4", "10-0-1-5"]),
    (" n0\n", ["n0"]),
]


@pytest.mark.parametrize(("text", "names"), NODES, ids=[node[0].strip() for node in NODES])
def test_node_lists(text, names):
    assert expand_nodes(text) == names


@pytest.mark.parametrize("text", ["", "a,,b", "n[1-", "n1]", "n[a-b]", "n[3-1]", "n[]", "n[[1]]", "a,"])
def test_what_is_no_node_list_is_named(text):
    with pytest.raises(ConfigError, match="SLURM_JOB_NODELIST="):
        expand_nodes(text)


def test_tasks_per_node():
    assert expand_tasks("2") == [2]
    assert expand_tasks("2(x3),1") == [2, 2, 2, 1]
    assert expand_tasks("8(x2),4,8(x1)") == [8, 8, 4, 8]
    with pytest.raises(ConfigError, match="SLURM_TASKS_PER_NODE=two"):
        expand_tasks("two")


def test_ports_are_known_to_all_and_not_ephemeral():
    ports = [port_of(job, step) for job in range(1, 5000) for step in (0, 1)]
    assert min(ports) >= 10_000 and max(ports) < 32_768
    assert len({port_of(job, 0) for job in range(1, 2000)}) == 1999, "jobs side by side meet at one port"


STEP = {
    "SLURM_PROCID": "5", "SLURM_STEP_NUM_TASKS": "6", "SLURM_LOCALID": "1", "SLURM_NODEID": "2",
    "SLURM_STEP_TASKS_PER_NODE": "2(x3)", "SLURM_JOB_NODELIST": "x[08-11]", "SLURM_STEP_NODELIST": "x[09-11]",
    "SLURM_JOB_ID": "100", "SLURM_STEP_ID": "3",
}  # fmt: skip


def launched(monkeypatch, variables):
    for name in list(environment.os.environ):
        if name.startswith("SLURM_") or name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            monkeypatch.delenv(name)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    return environment.launched_environment()


def test_srun_gives_the_place(monkeypatch):
    place = launched(monkeypatch, STEP)
    assert (place.rank, place.world_size, place.local_rank, place.local_world_size) == (5, 6, 1, 2)
    assert place.init_method == f"tcp://x09:{port_of(100, 3)}"
    place = launched(monkeypatch, {**STEP, "MASTER_ADDR": "h", "MASTER_PORT": "12000"})
    assert place.init_method == "tcp://h:12000"


def test_a_shell_in_a_job_is_started_bare(monkeypatch):
    """srun --pty bash is a step of one task, and a batch script none."""
    assert launched(monkeypatch, {**STEP, "SLURM_STEP_NUM_TASKS": "1"}) is None
    assert launched(monkeypatch, {"SLURM_JOB_ID": "1", "SLURM_PROCID": "0", "SLURM_NTASKS": "4"}) is None
    one = {**STEP, "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0", "MASTER_ADDR": "h", "MASTER_PORT": "1"}
    assert launched(monkeypatch, one).world_size == 1


def test_a_missing_node_list_is_named():
    with pytest.raises(ConfigError, match="SLURM_JOB_NODELIST: is not set"):
        rendezvous_endpoint({"SLURM_JOB_ID": "1"})
