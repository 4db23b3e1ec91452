"""The batch script, run by bash as it is, with an srun that writes down what it was given."""

import socket
import subprocess
import sys
from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from megaasync.cluster.docker import docker_command
from megaasync.cluster.script import JobRun, hydra_quoted, render_script
from megaasync.config import read
from megaasync.config.schema import DockerCluster
from tests.support.cli import environment
from tests.support.scripts import job_of, run_script

VALUES = [
    "plain",
    "a=b",
    "a,b,c",
    "two words",
    "  blanks at both ends  ",
    "it's",
    'say "hello"',
    "both ' and \"",
    "[1,2]",
    "{a: 1}",
    "$HOME",
    "${run.dir}",
    "`id`",
    "$(id)",
    "back\\slash",
    'ends in \\"',
    "semi;colon & pipe | hash # star * tilde ~",
    "ü 漢字 ñ",
    "mlx5_0:1,mlx5_1:1",
    "!history",
    "per%cent %j",
    "tab\there",
]


@pytest.mark.parametrize("value", VALUES)
def test_values_reach_the_job_unchanged(tmp_path, value):
    """As a word that Hydra reads back, as an environment variable, as a folder's name."""
    folder = tmp_path / value.strip().replace("/", "")
    folder.mkdir()
    _, calls, _ = run_script(job_of(folder, env={"VALUE": value}), tmp_path)
    (call,) = calls
    config = str(folder / "config.yaml")
    assert call["argv"] == ["--kill-on-bad-exit=1", "python", "-m", "megaasync.pretrain", "--run-config", config]
    assert call["env"]["VALUE"] == value
    parsed = OverridesParser.create().parse_override(f"data.path={hydra_quoted(value)}")
    assert str(parsed.value()) == value.replace("${", "\\${")  # OmegaConf takes that away


def test_odd_values_reach_the_config(tmp_path):
    """The whole way: Hydra, OmegaConf and the reader give the value that was quoted."""
    values = [value for value in VALUES if "\t" not in value]
    chosen = "|".join(values)
    done = subprocess.run(
        [sys.executable, "-m", "megaasync.pretrain", "data=hf", f"data.path={hydra_quoted(chosen)}", "--cfg", "job"],
        cwd=tmp_path, env=environment(), capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    import yaml
    from omegaconf import OmegaConf

    assert OmegaConf.create(yaml.safe_load(done.stdout)).data.path == chosen


def test_ranks_meet_at_the_first_node_and_a_free_port_outside_of_the_ephemeral_range(tmp_path):
    job = job_of(tmp_path)
    taken = 10042
    with socket.socket() as one, socket.socket(socket.AF_INET6) as other:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        one.bind(("127.0.0.1", taken))
        one.listen()
        other.bind(("::1", taken + 1))
        other.listen()
        _, (call,), _ = run_script(job, tmp_path)
    env = call["env"]
    assert (env["MASTER_ADDR"], env["MASTER_PORT"]) == ("n0", str(taken + 2))
    _, (call,), _ = run_script(job, tmp_path)
    low = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    assert call["env"]["MASTER_PORT"] == str(taken) and taken + 1000 < low


@pytest.mark.parametrize("status", [0, 1, 2, 7, 130, 143])
def test_the_exit_code_is_kept(tmp_path, status):
    assert run_script(job_of(tmp_path), tmp_path, STATUSES=str(status))[0] == status


def test_the_status_of_the_rank_that_ended_first_counts(tmp_path):
    """srun tells 143 when it has ended the others."""
    (tmp_path / ".ended").write_text("7 final\n")  # of an earlier time
    assert run_script(job_of(tmp_path), tmp_path, STATUSES="143")[0] == 143
    assert run_script(job_of(tmp_path), tmp_path, STATUSES="143", ENDED="2 final")[0] == 2


@pytest.mark.parametrize(
    ("statuses", "ended", "tries", "status"),
    [
        ("1,1,1,1", None, 3, 1),
        ("1,0", None, 2, 0),
        ("143,143,0", None, 3, 0),
        ("143", "1 again", 3, 1),
        ("143", "2 final", 1, 2),
        ("143", "130 final", 1, 130),
        ("143", "1 final", 1, 1),
        ("0", None, 1, 0),
    ],
)
def test_a_failed_step_is_tried_again_within_the_job(tmp_path, statuses, ended, tries, status):
    env = {} if ended is None else {"ENDED": ended}
    found, calls, _ = run_script(job_of(tmp_path, max_restarts=2), tmp_path, STATUSES=statuses, **env)
    assert (found, len(calls)) == (status, tries)
    assert [call["argv"][-1] == "--goes-on" for call in calls] == [False, True, True][:tries]
    pauses = tmp_path / "calls.sleep"
    assert (pauses.read_text().split() if pauses.exists() else []) == ["1", "2"][: tries - 1]


def test_restarts_are_counted_from_the_last_progress(tmp_path):
    """Four failures, each after a newer checkpoint: a run of a month may fail more often than twice in all."""
    found, calls, _ = run_script(job_of(tmp_path, max_restarts=2), tmp_path, STATUSES="1,1,1,1,0", PROGRESS="1")
    assert (found, len(calls)) == (0, 5)
    assert (tmp_path / "calls.sleep").read_text().split() == ["1"] * 4


def test_a_job_that_was_queued_again_goes_on_from_its_own_checkpoint(tmp_path):
    job = job_of(tmp_path)
    assert run_script(job, tmp_path)[1][0]["argv"][-1].endswith("config.yaml")
    assert run_script(job, tmp_path, SLURM_RESTART_COUNT="1")[1][0]["argv"][-1] == "--goes-on"


def test_a_run_that_is_to_go_on_is_queued_again_and_its_mark_goes(tmp_path):
    (tmp_path / "marks").touch()
    status, calls, asked = run_script(job_of(tmp_path, max_restarts=2), tmp_path, STATUSES="130")
    assert (status, len(calls)) == (0, 1) and "requeue 42" in asked
    assert not (tmp_path / ".requeue").exists()
    status, _, asked = run_script(job_of(tmp_path, requeue=False), tmp_path, STATUSES="130")
    assert status == 130 and asked.count("requeue") == 1, "cluster.requeue=false was not heeded"


def test_an_old_mark_does_not_queue_a_failed_job_again(tmp_path):
    (tmp_path / ".requeue").touch()
    status, _, asked = run_script(job_of(tmp_path), tmp_path, STATUSES="2")
    assert status == 2 and "requeue" not in asked


def test_a_task_of_an_array_queues_itself_again_and_not_the_others(tmp_path):
    (tmp_path / "marks").touch()
    runs = tuple(JobRun(tmp_path / str(n)) for n in range(3))
    for run in runs:
        run.folder.mkdir()
    env = {"SLURM_ARRAY_JOB_ID": "42", "SLURM_ARRAY_TASK_ID": "1", "SLURM_JOB_ID": "43"}
    _, _, asked = run_script(job_of(tmp_path, runs=runs), tmp_path, STATUSES="130", **env)
    assert "requeue 42_1\n" in asked


def test_an_array_takes_the_run_of_its_number(tmp_path):
    runs = tuple(JobRun(tmp_path / str(n)) for n in range(3))
    job = job_of(tmp_path, runs=runs)
    assert "#SBATCH --array=0-2\n" in render_script(job) and "slurm-%A_%a.log" in render_script(job)
    for number in range(3):
        _, (call,), _ = run_script(job, tmp_path, SLURM_ARRAY_TASK_ID=str(number))
        assert call["argv"][-2:] == ["--run-config", str(tmp_path / str(number) / "config.yaml")]


def test_directives_say_what_the_config_says(tmp_path):
    changes = {
        "nodes": 3, "gpus_per_node": 8, "tasks_per_node": None, "cpus_per_task": 6, "partition": "big", "account": "me",
        "qos": "high", "constraint": "h200&ib", "exclude": "n[01-02]", "reservation": "mine", "time": "1-00:00:00",
        "signal_seconds": 300, "extra_sbatch": ["--switches=1", "--mcs-label=x"], "modules": ["gcc/13", "nccl"],
        "job_name": "mine", "mem": "480G", "gres": "nvme:1", "comment": "a b", "mail_type": "END,FAIL",
        "mail_user": "me@here", "dependency": "afterok:7", "exclusive": True, "nice": 10, "wckey": "w",
        "setup": ["module load cuda/13", "ulimit -c 0"],
    }  # fmt: skip
    folder = tmp_path / "with blank"
    text = render_script(job_of(folder, **changes))
    for line in (
        "--nodes=3", "--ntasks-per-node=8", "--gpus-per-node=8", "--cpus-per-task=6", "--partition=big",
        "--account=me", "--qos=high", "--constraint=h200&ib", "--exclude=n[01-02]", "--reservation=mine",
        "--time=1-00:00:00", "--signal=USR1@300", "--requeue", "--open-mode=append", "--gres=nvme:1", "--switches=1",
        "--mcs-label=x", "--job-name=mine", "--mem=480G", '--comment="a b"', "--mail-type=END,FAIL",
        "--mail-user=me@here", "--dependency=afterok:7", "--exclusive", "--nice=10", "--wckey=w",
        f'--output="{folder}/slurm-%j.log"', f'--chdir="{folder}"',
    ):  # fmt: skip
        assert f"#SBATCH {line}\n" in text, line
    assert text.index("module load gcc/13 nccl\nmodule load cuda/13\nulimit -c 0\n") < text.index("srun")
    for changed in ({"gres": "gpu:h200:8"}, {"gpus_per_task": 1}):
        text = render_script(job_of(folder, **{**changes, **changed}))
        assert "--gpus-per-node" not in text and f"--{next(iter(changed)).replace('_', '-')}=" in text
    assert max(map(len, text.splitlines())) < 200 + len(str(folder))
    assert subprocess.run(["bash", "-n"], input=text, text=True).returncode == 0


def test_containers(tmp_path):
    image = "nvcr.io/nvidia/pytorch:26.01-py3"
    _, (call,), _ = run_script(job_of(tmp_path, container_image=image, mounts=["/data:/data:ro"]), tmp_path)
    assert call["argv"][1:5] == [
        f"--container-image={image}",
        f"--container-mounts={tmp_path}:{tmp_path},/data:/data:ro",
        f"--container-workdir={tmp_path}",
        "python",
    ]
    _, (call,), _ = run_script(
        job_of(tmp_path, container_image="image.sif", container_runtime="apptainer", mounts=["/a b:/c"]), tmp_path
    )
    bind = ["--bind", f"{tmp_path}:{tmp_path}", "--bind", "/a b:/c"]
    assert call["argv"][1:12] == ["apptainer", "exec", "--nv", *bind, "--pwd", str(tmp_path), "image.sif", "python"]


def test_docker_runs_the_same_on_its_own_host(tmp_path):
    plain = {
        "name": "docker", "nodes": 1, "gpus_per_node": 8, "gpu_memory_gib": None, "gpu_tflops": None,
        "network_gbytes": None, "container_image": "m:1", "mounts": ["/data:/data"], "env": {"A": "b c"},
        "submit": False, "secrets": ["WANDB_API_KEY"], "check_files": True,
    }  # fmt: skip
    command = docker_command(read(DockerCluster, plain, "cluster"), JobRun(tmp_path / "run"), directory=tmp_path)
    assert command[:5] == ["docker", "run", "--rm", "--gpus", "all"]
    assert "A=b c" in command and [item for item in command if ":/" in item] == [
        f"{tmp_path}:{tmp_path}",
        "/data:/data",
    ]
    assert command[command.index("m:1") :] == [
        "m:1", "python", "-m", "megaasync.pretrain", "--run-config", str(tmp_path / "run/config.yaml")
    ]  # fmt: skip
    assert "WANDB_API_KEY" in command and not any("WANDB_API_KEY=" in word for word in command)
    elsewhere = tmp_path.parent / f"{tmp_path.name}-cache"
    command = docker_command(
        read(DockerCluster, plain, "cluster"), JobRun(tmp_path), directory=tmp_path, data_folders=[elsewhere]
    )
    assert f"{elsewhere}:{elsewhere}" in command
