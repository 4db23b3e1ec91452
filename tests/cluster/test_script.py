"""The batch script, run by bash as it is, with an srun that writes down what it was given."""

import hashlib
import json
import os
import re
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from megaasync.cluster.docker import docker_command
from megaasync.cluster.script import Job, JobRun, hydra_quoted, render_script
from megaasync.cluster.submit import submit
from megaasync.config import ConfigError, read
from megaasync.config.schema import DockerCluster, SlurmCluster
from tests.entry.test_text_values import SLURM as ANY_SLURM
from tests.support.cli import REPOSITORY, environment
from tests.support.configs import small_config

DEFAULT_CONTEXT = {**ANY_SLURM, "tasks_per_node": 2, "requeue": True}

SRUN = f"""#!{sys.executable}
import json, os, pathlib, sys
calls = pathlib.Path(os.environ["CALLS"])
with calls.open("a") as file:
    file.write(json.dumps({{"argv": sys.argv[1:], "env": dict(os.environ)}}) + "\\n")
run = pathlib.Path(sys.argv[sys.argv.index("--run-config") + 1]).parent
if (calls.parent / "marks").exists():
    (run / ".requeue").touch()
statuses = os.environ.get("STATUSES", "0").split(",")
if "PROGRESS" in os.environ:
    made = run / "checkpoints" / f"step_{{len(calls.read_text().splitlines()):08}}"
    made.mkdir(parents=True)
    (made / "COMPLETE.json").touch()
if "ENDED" in os.environ:
    (run / ".ended").write_text(os.environ["ENDED"] + "\\n")
sys.exit(int(statuses[min(len(calls.read_text().splitlines()), len(statuses)) - 1]))
"""

SCONTROL = """#!/bin/sh
echo "$@" >> "$CALLS.scontrol"
[ "$1" = show ] && echo n0 && echo n1
true
"""


def cluster_of(**changes):
    return read(SlurmCluster, {**DEFAULT_CONTEXT, **changes}, "cluster")


def job_of(folder, max_restarts=0, runs=None, data_folders=(), **changes):
    return Job(
        name="name",
        cluster=cluster_of(**changes),
        runs=runs or (JobRun(folder),),
        folder=folder,
        directory=folder,
        python="python",
        data_folders=data_folders,
        max_restarts=max_restarts,
        made="Written by a test.",
    )


def run_script(job, tmp_path, **env):
    """Run a script with stubs of SLURM's commands; (status, calls of srun, calls of scontrol)."""
    stubs = tmp_path / "stubs"
    stubs.mkdir(exist_ok=True)
    (stubs / "srun").write_text(SRUN)
    (stubs / "scontrol").write_text(
        '#!/bin/sh\necho "$@" >> "$CALLS.scontrol"\n[ "$1" = show ] && echo n0 && echo n1\ntrue\n'
    )
    (stubs / "sleep").write_text('#!/bin/sh\necho "$1" >> "$CALLS.sleep"\n')
    for name in ("srun", "scontrol", "sleep"):
        (stubs / name).chmod(0o755)
    script = tmp_path / "job.sbatch"
    script.write_text(render_script(job))
    calls = tmp_path / "calls"
    calls.unlink(missing_ok=True)
    done = subprocess.run(
        ["bash", script],
        env={
            "PATH": f"{stubs}:{os.environ['PATH']}", "CALLS": str(calls), "SLURM_JOB_ID": "42",
            "SLURM_JOB_NODELIST": "n[0-1]", **env,
        },
        capture_output=True,
        text=True,
    )  # fmt: skip
    assert done.stderr == "", done.stderr
    asked = Path(f"{calls}.scontrol")
    return (
        done.returncode,
        [json.loads(line) for line in calls.read_text().splitlines()],
        asked.read_text() if asked.exists() else "",
    )


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
    assert "A=b c" in command and [one for one in command if ":/" in one] == [f"{tmp_path}:{tmp_path}", "/data:/data"]
    assert command[command.index("m:1") :] == [
        "m:1", "python", "-m", "megaasync.pretrain", "--run-config", str(tmp_path / "run/config.yaml")
    ]  # fmt: skip
    assert "WANDB_API_KEY" in command and not any("WANDB_API_KEY=" in word for word in command)
    elsewhere = tmp_path.parent / f"{tmp_path.name}-cache"
    command = docker_command(
        read(DockerCluster, plain, "cluster"), JobRun(tmp_path), directory=tmp_path, data_folders=[elsewhere]
    )
    assert f"{elsewhere}:{elsewhere}" in command


WRONG = [
    ({"tasks_per_node": None}, "cluster.tasks_per_node=null: .*; set cluster.tasks_per_node=2"),
    ({"tasks_per_node": 2, "gpus_per_node": 1}, "cluster.tasks_per_node=2: every rank needs a GPU"),
    ({"nodes": 2}, "cluster.nodes=2: 2 x 2 ranks per node, .* = 2 ranks"),
    ({"time": "one day"}, "cluster.time=one day: cannot be read; give minutes"),
    (
        {"time": 2, "signal_seconds": 120},
        "cluster.signal_seconds=120: comes before .* cluster.time=2; set .* half .* 60",
    ),
    ({"time": "1-00:00", "signal_seconds": 43201}, "cluster.signal_seconds=43201: .* 43200"),
    ({"signal_seconds": 0}, "cluster.signal_seconds=0: must be at least 1"),
    ({"mounts": ["/data"]}, "cluster.mounts: '/data' cannot be read; give host:container"),
    ({"mounts": ["/a,b:/c"]}, "cluster.mounts: '/a,b:/c' cannot be read"),
    ({"env": {"A-B": "c"}}, "cluster.env.A-B: is no name"),
    ({"extra_sbatch": ["gres=gpu"]}, "cluster.extra_sbatch: 'gres=gpu' is no option"),
    ({"extra_sbatch": ["--a\nrm -rf"]}, "cluster.extra_sbatch.0=.*holds a line break"),
    ({"gpus_per_task": 2}, "cluster.gpus_per_task=2: a rank has one GPU; set 1, or null"),
    ({"extra_sbatch": ["--nodes=4"]}, "cluster.extra_sbatch: '--nodes=4' .*; set cluster.nodes instead"),
    ({"extra_sbatch": ["-t 10"]}, "'-t 10' would stand beside the script's --time; set cluster.time instead"),
    ({"extra_sbatch": ["--output=x"]}, "'--output=x' .*; leave it out"),
    ({"setup": ["a", "module load\nrm -rf"]}, "cluster.setup.1=.*holds a line break"),
    ({"env": {"A": "b\nc"}}, "cluster.env.A=.*holds a line break"),
    ({"partition": "a\nb"}, "cluster.partition=.*holds a line break"),
    ({"mounts": "x"}, "cluster.mounts='x': expected a list, as in 'cluster.mounts=\\[\"a\",\"b\"\\]'"),
]


@pytest.mark.parametrize(("changes", "message"), WRONG, ids=[str(one[0]) for one in WRONG])
def test_wrong_cluster_keys_are_named(changes, message):
    with pytest.raises(ConfigError, match=message):
        small_config(cluster={**DEFAULT_CONTEXT, **changes}, parallel__pipeline=2, checkpoint__interval=5)


def test_requeue_needs_checkpoints():
    with pytest.raises(ConfigError, match=r"cluster.requeue=true: .* set checkpoint.interval"):
        small_config(cluster=DEFAULT_CONTEXT, parallel__pipeline=2, checkpoint__interval=None)


def launch(*arguments, cwd, **env):
    return subprocess.run(
        [sys.executable, "-m", "megaasync.launch", *arguments],
        cwd=cwd, env=environment(**env), capture_output=True, text=True, timeout=180,
    )  # fmt: skip


SLURM = [
    "cluster=slurm",
    "cluster.gpus_per_node=null",
    "cluster.tasks_per_node=2",
    "parallel.pipeline=2",
    "data=synthetic",
]


def test_launch_writes_a_job_and_says_how_to_submit_it(tmp_path):
    done = launch(*SLURM, "cluster.submit=false", "run.dir=run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "run"
    assert {path.name for path in folder.iterdir()} == {
        "config.yaml", "environment.json", "job.sbatch", "plan.json", "overrides.txt"
    }  # fmt: skip
    assert "memory     per rank" in done.stdout and f"sbatch {folder / 'job.sbatch'}" in done.stdout
    record = json.loads((folder / "environment.json").read_text())
    assert record["packages"]["torch"] and re.fullmatch("[0-9a-f]{16}", record["code_hash"])
    assert re.fullmatch("[0-9a-f]{40}", record["git_commit"] or "0" * 40)
    text = (folder / "job.sbatch").read_text()
    assert "parallel.pipeline" not in text and "--run-config" in text
    assert (folder / "overrides.txt").read_text().splitlines() == SLURM
    assert record["config_sha256"] == hashlib.sha256((folder / "config.yaml").read_bytes()).hexdigest()


def test_launch_without_slurm_or_with_a_refusal_says_so(tmp_path, monkeypatch):
    only_python = {"PATH": str(Path(sys.executable).parent)}
    done = launch(*SLURM, "run.dir=run", cwd=tmp_path, **only_python)
    assert done.returncode == 2 and "there is no sbatch on this host" in done.stderr and "Traceback" not in done.stderr
    stub = tmp_path / "sbatch"
    stub.write_text("#!/bin/sh\necho 'sbatch: error: invalid partition specified: big' >&2\nexit 1\n")
    stub.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(ConfigError, match="invalid partition specified: big; change the cluster"):
        submit(tmp_path / "job.sbatch")
    stub.write_text('#!/bin/sh\n[ "$1" = --test-only ] && exit 0\necho "77;cluster"\n')
    assert submit(tmp_path / "job.sbatch") == 77
    stub.write_text('#!/bin/sh\n[ "$1" = --test-only ] && echo "job violates its limits" >&2 && exit 1\necho 77\n')
    with pytest.raises(ConfigError, match="job violates its limits"):
        submit(tmp_path / "job.sbatch")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["data=synthetic"], ["cluster=local", "set cluster=slurm"]),
        ([*SLURM, "train.steps=-1"], ["train.steps=-1", "at least 1"]),
        ([*SLURM, "cluster.nodes=2"], ["cluster.nodes=2", "parallel.data=auto"]),
        ([*SLURM, "cluster.partitoin=x"], ["cluster.partitoin", "did you mean cluster.partition"]),
        ([*SLURM, "run.dir=/proc/x"], ["run.dir=/proc/x", "all nodes see"]),
        (["-m", *SLURM, "cluster.time=100,200"], ["same cluster.* keys"]),
        (["-m", *SLURM, "train.seed=1,2", "hydra/launcher=joblib"], ["hydra/launcher", "one job array"]),
    ],
    ids=lambda v: v[-1],
)
def test_wrong_launches_leave_nothing(tmp_path, arguments, words):
    done = launch(*arguments, cwd=tmp_path)
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
    last = done.stderr.strip().splitlines()
    message = next(line for line in last if line.startswith("error: "))
    for word in words:
        assert word in message
    assert list(tmp_path.iterdir()) == []


def test_the_page_shows_the_script_as_it_is_written(tmp_path):
    page = (REPOSITORY / "docs" / "cluster.md").read_text()
    command = page.split("The job. `cluster.submit=false`")[1].split("```bash\n")[1].split("```")[0]
    words = shlex.split(command.replace("\\\n", " "))
    done = launch(*words[3:], "cluster.submit=false", "cluster.check_files=false", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    written = (tmp_path / "runs" / "moe10b" / "job.sbatch").read_text().replace(str(tmp_path), "/shared/me")
    shown = page.split("## The script that it writes")[1].split("```bash\n")[1].split("```")[0]
    assert shown.splitlines()[2:] == written.splitlines()[2:]
