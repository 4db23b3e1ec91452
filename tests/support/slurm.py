"""A real SLURM cluster on this host for a test: slurmctld, and a slurmd with a host name of its own per node."""

import os
import shutil
import socket
import subprocess
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

_NEEDED = ("slurmctld", "slurmd", "sbatch", "srun", "scontrol")

# Each slurmd has a UTS namespace, so a host name, of its own; all share a mount namespace with a private /etc/hosts.
_START = """
mount --bind $D/hosts /etc/hosts
slurmctld -c
for i in $(seq 0 $((N-1))); do unshare -u bash -c "hostname n$i; exec slurmd -N n$i"; done
"""


def install_slurm() -> None:
    """Install SLURM if it is not there; the test is skipped, with a word, where that cannot be."""
    if os.geteuid() != 0:
        pytest.skip("a SLURM cluster on this host needs root")
    if all(shutil.which(name) for name in _NEEDED):
        return
    if shutil.which("apt-get") is None:
        pytest.skip("SLURM is not installed, and there is no apt-get to install it with")
    for command in (["apt-get", "update"], ["apt-get", "install", "-y", "--no-install-recommends", "slurm-wlm"]):
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"SLURM cannot be installed: {done.stderr.strip().splitlines()[-1:]}")


def _config(folder: Path, nodes: int, port: int) -> str:
    host = socket.gethostname().partition(".")[0]
    lines = [
        "ClusterName=ma", f"SlurmctldHost={host}(127.0.0.1)", "SlurmUser=root", "SlurmdUser=root",
        "AuthType=auth/none", "AuthInfo=cred_expire=5", "CredType=cred/none", f"SlurmctldPort={port}",
        f"SlurmctldPidFile={folder}/run/ctld.pid", f"SlurmdPidFile={folder}/run/%n.pid",
        f"SlurmctldLogFile={folder}/log/ctld.log", f"SlurmdLogFile={folder}/log/%n.log",
        f"StateSaveLocation={folder}/state", f"SlurmdSpoolDir={folder}/spool/%n",
        "ProctrackType=proctrack/linuxproc", "TaskPlugin=task/none", "SwitchType=switch/none", "MpiDefault=none",
        "SlurmdParameters=config_overrides", "MailProg=/bin/true", "SelectType=select/cons_tres",
        "SelectTypeParameters=CR_Core", "ReturnToService=2", "JobRequeue=1", "KillWait=5",
        "SchedulerParameters=sched_interval=1,batch_sched_delay=0,sched_min_interval=0",
        "AccountingStorageType=accounting_storage/none", "JobAcctGatherType=jobacct_gather/none",
        *(
            f"NodeName=n{i} NodeHostname=n{i} NodeAddr=127.0.0.1{i} Port={port + 10 + i} CPUs=4 RealMemory=8000"
            for i in range(nodes)
        ),
        f"PartitionName=main Nodes=n[0-{nodes - 1}] Default=YES MaxTime=INFINITE State=UP OverSubscribe=NO",
    ]  # fmt: skip
    return "\n".join(lines) + "\n"


class Slurm:
    """Commands against the cluster."""

    def __init__(self, folder: Path) -> None:
        self.environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}

    def __call__(self, *command: str) -> str:
        """Run a command of SLURM's and give what it says."""
        done = subprocess.run(command, capture_output=True, text=True, env=self.environment, timeout=60)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def state(self, job: str) -> dict[str, str]:
        """What scontrol tells of a job."""
        words = self("scontrol", "show", "job", job).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def wait(self, job: str, *, until: str = "COMPLETED FAILED CANCELLED TIMEOUT NODE_FAIL", limit: float = 180) -> str:
        """Until a job is in one of some states; the state."""
        deadline = time.monotonic() + limit
        while time.monotonic() < deadline:
            state = self.state(job)["JobState"]
            if state in until.split():
                return state
            time.sleep(0.2)
        raise AssertionError(f"job {job} is {self.state(job)}")


@contextmanager
def slurm_cluster(folder: Path, *, nodes: int = 2, port: int = 17000):
    """Bring a cluster up, and down again."""
    install_slurm()
    for name in ("state", "log", "run", *(f"spool/n{i}" for i in range(nodes))):
        (folder / name).mkdir(parents=True)
    (folder / "slurm.conf").write_text(_config(folder, nodes, port))
    hosts = Path("/etc/hosts").read_text() + "".join(f"127.0.0.1{i} n{i}\n" for i in range(nodes))
    (folder / "hosts").write_text(hosts)
    slurm = Slurm(folder)
    started = subprocess.run(
        ["unshare", "-m", "bash", "-c", _START],
        env={**slurm.environment, "D": str(folder), "N": str(nodes)},
        capture_output=True,
        text=True,
    )
    if started.returncode:
        pytest.skip(f"no namespaces for a SLURM cluster here: {started.stderr.strip()}")
    try:
        deadline = time.monotonic() + 30
        while slurm("sinfo", "-h", "-N", "-t", "idle", "-o", "%N").split() != [f"n{i}" for i in range(nodes)]:
            assert time.monotonic() < deadline, (folder / "log" / "ctld.log").read_text()
            time.sleep(0.1)
        yield slurm
    finally:
        subprocess.run(["scancel", "-u", "root", "--full"], env=slurm.environment, capture_output=True)
        subprocess.run(["scontrol", "shutdown"], env=slurm.environment, capture_output=True, timeout=30)
        deadline = time.monotonic() + 10
        for pid_file in (folder / "run").glob("*.pid"):
            pid = int(pid_file.read_text()) if pid_file.exists() else 0
            while pid and Path(f"/proc/{pid}/cmdline").exists() and Path(f"/proc/{pid}/cmdline").read_bytes():
                if time.monotonic() > deadline:
                    os.kill(pid, 9)
                time.sleep(0.1)
