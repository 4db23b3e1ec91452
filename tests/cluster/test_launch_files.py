"""What a launch writes and looks at: the config that was planned, the files that the job will read, and no secret."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from megaasync.cluster.script import own_mounts
from megaasync.config import ConfigError
from megaasync.config.secrets import is_secret, redacted, take_secrets
from megaasync.data.indexed_dataset import IndexedDataset
from megaasync.entry.hydra_app import _note_secrets
from megaasync.entry.run_config import read_run_config
from tests.cluster.test_launch import SLURM, launch
from tests.support.cli import REPOSITORY, TINY, environment
from tests.support.tiers import slow_params

SECRET = "s3cr3t-0123456789abcdef"


def bash(command, cwd, **env):
    return subprocess.run(
        ["bash", "-c", command], cwd=cwd, env=environment(**env), capture_output=True, text=True, timeout=120
    )


def pretrain_from(folder, *arguments, cwd, **env):
    return subprocess.run(
        [sys.executable, "-m", "megaasync.pretrain", "--run-config", str(folder / "config.yaml"), *arguments],
        cwd=cwd, env=environment(**env), capture_output=True, text=True, timeout=120,
    )  # fmt: skip


def files_with(folder, text):
    return [path for path in folder.rglob("*") if path.is_file() and text.encode() in path.read_bytes()]


def test_what_is_a_secret_goes_by_its_name():
    assert all(map(is_secret, ["WANDB_API_KEY", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "DB_PASSWORD", "api_key"]))
    assert all(map(is_secret, ["PGPASS", "MYSQL_PWD", "SMTP_PASS", "GITHUB_PAT", "HFTOKEN"]))
    assert not any(map(is_secret, ["TOKENIZERS_PARALLELISM", "NCCL_DEBUG", "MONKEY", "KEYBOARD", "PATH", "PWD"]))
    assert not any(map(is_secret, ["HF_TOKEN_PATH", "AWS_SECRET_DIR", "SSH_AUTH_SOCK", "KEY_FILE"]))
    assert redacted(f"a {SECRET} b", {"HF_TOKEN": SECRET, "HOME": "/root"}) == "a <HF_TOKEN> b"


def test_a_secret_moves_out_of_the_config():
    plain = {"cluster": {"env": {"HF_TOKEN": SECRET, "A": "b"}, "secrets": ["WANDB_API_KEY"]}}
    assert take_secrets(plain, {}) == {"HF_TOKEN": SECRET}
    assert plain == {"cluster": {"env": {"A": "b"}, "secrets": ["WANDB_API_KEY", "HF_TOKEN"]}}
    plain["cluster"]["setup"] = [f"login {SECRET}"]
    with pytest.raises(ConfigError, match=r"cluster\.setup: holds the value of HF_TOKEN.*secrets=\[HF_TOKEN\]"):
        take_secrets(plain, {"HF_TOKEN": SECRET})


def test_a_setup_line_that_gives_a_secret_a_value_is_refused():
    def setup(line):
        return {"cluster": {"env": {}, "secrets": [], "setup": [line]}}

    for line in ("export WANDB_API_KEY=abc", "HF_TOKEN='x y' login", 'set -a; DB_PASSWORD="q"'):
        with pytest.raises(ConfigError, match=r"cluster\.setup: gives \w+ a value"):
            take_secrets(setup(line), {})
    for line in ("export WANDB_API_KEY=$KEY", "export HF_TOKEN=${X}", "export A=1", 'K_TOKEN="$(cat ~/t)"'):
        take_secrets(setup(line), {})


def test_words_that_stand_in_every_config_are_no_secret():
    plain = {"train": {"lr_schedule": "constant"}, "logging": {"project": "megaasync"}}
    assert take_secrets(plain, {"SECRET_KEY": "constant", "DB_PASSWORD": "megaasync"}) == {}


@pytest.mark.parametrize("form", ["+cluster.env.HF_TOKEN={}", "++cluster.env={{HF_TOKEN:{},A:1e3}}"])
@pytest.mark.parametrize("value", [SECRET, "${oc.env:MY_KEY}", "null"])
def test_forms_of_a_secret_on_the_command_line(monkeypatch, form, value):
    monkeypatch.setenv("MY_KEY", SECRET)
    monkeypatch.setenv("HF_TOKEN", "set before")
    kept, names = _note_secrets(["train.steps=3", form.format(value)])
    assert names == ["HF_TOKEN"] and not any(SECRET in word or "HF_TOKEN" in word for word in kept)
    assert os.environ["HF_TOKEN"] == ("set before" if value == "null" else SECRET)
    assert len(kept) == (2 if "A:" in form else 1)


@pytest.mark.parametrize(
    "way", slow_params(["command line", "dict", "yaml", "environment"], kept=(0, 2), area="cluster")
)
def test_no_file_of_a_launch_holds_a_secret_and_the_job_has_it(tmp_path, way):
    """Three ways to give it; config.yaml names it, the environment carries it, and a job without it is refused."""
    arguments, env = [*SLURM, "cluster.submit=false", "run.dir=run"], {}
    if way == "command line":
        arguments.append(f"+cluster.env.WANDB_API_KEY={SECRET}")
    elif way == "dict":
        arguments.append(f"++cluster.env={{WANDB_API_KEY:{SECRET}}}")
    elif way == "yaml":
        (tmp_path / "conf/experiment").mkdir(parents=True)
        content = "# @package _global_\ncluster:\n  env:\n    WANDB_API_KEY: ${oc.env:MY_KEY}\n    A: '1'\n"
        (tmp_path / "conf/experiment/mine.yaml").write_text(content)
        arguments = ["--config-dir", str(tmp_path / "conf"), *arguments, "experiment=mine"]
        env["MY_KEY"] = SECRET
    else:
        arguments.append("cluster.secrets=[WANDB_API_KEY]")
        env["WANDB_API_KEY"] = SECRET
    done = launch(*arguments, cwd=tmp_path, **env)
    assert done.returncode == 0, done.stderr
    assert files_with(tmp_path, SECRET) == [] and SECRET not in done.stdout + done.stderr
    assert yaml.safe_load((tmp_path / "run/config.yaml").read_text())["cluster"]["secrets"] == ["WANDB_API_KEY"]
    script = (tmp_path / "run/job.sbatch").read_text()
    assert "for name in WANDB_API_KEY; do" in script
    ran = pretrain_from(tmp_path / "run", cwd=tmp_path)
    assert ran.returncode == 2 and "cluster.secrets: WANDB_API_KEY is not set" in ran.stderr
    ran = pretrain_from(tmp_path / "run", cwd=tmp_path, WANDB_API_KEY=SECRET)
    assert "started bare, this host is not that cluster" in ran.stderr, "the secret was there, and the next check spoke"
    part = script[script.index("for name in") : script.index("# What is run")]
    assert bash(part, tmp_path).returncode == 2 and bash(part, tmp_path, WANDB_API_KEY="x").returncode == 0


def test_a_missing_secret_is_refused_before_submission(tmp_path):
    done = launch(*SLURM, "cluster.secrets=[NOT_HERE_TOKEN]", cwd=tmp_path)
    assert done.returncode == 2 and "cluster.secrets: NOT_HERE_TOKEN is not set" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_secret_is_in_no_file_of_a_run_and_in_no_message(tmp_path):
    """A checkpoint has the whole config in it."""
    run = [*TINY, "checkpoint.interval=2", "train.steps=2", "run.dir=run", "cluster=slurm",
           "cluster.gpus_per_node=null",
           "cluster.tasks_per_node=1", "cluster.preflight=false", f"+cluster.env.HF_TOKEN={SECRET}"]  # fmt: skip
    rank = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    ran = subprocess.run(
        [sys.executable, "-m", "megaasync.pretrain", *run], cwd=tmp_path, env=environment(**rank),
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    assert list((tmp_path / "run/checkpoints").iterdir()) and files_with(tmp_path, SECRET) == []
    wrong = subprocess.run(
        [sys.executable, "-m", "megaasync.pretrain", f"+cluster.env.HF_TOKEN={SECRET}", f"data.path={SECRET}",
         "data=hf"],
        cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert wrong.returncode == 2 and SECRET not in wrong.stderr


def user_config(folder, steps):
    (folder / "experiment").mkdir(parents=True, exist_ok=True)
    content = f"# @package _global_\ntrain:\n  steps: {steps}\ncluster:\n  time: 24:00:00\n"
    (folder / "experiment/mine.yaml").write_text(content)


def test_the_job_runs_what_was_planned_whatever_the_users_yaml_says_later(tmp_path):
    user_config(tmp_path / "conf", 5)
    done = launch(
        "--config-dir", "conf", *SLURM, "experiment=mine", "cluster.submit=false", "run.dir=run", cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    config = tmp_path / "run/config.yaml"
    assert yaml.safe_load(config.read_text())["train"]["steps"] == 5
    assert "#SBATCH --time=24:00:00\n" in (tmp_path / "run/job.sbatch").read_text()
    planned = config.read_bytes()
    user_config(tmp_path / "conf", 7)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "megaasync.pretrain", "--run-config", str(config), "--goes-on"],
            cwd=elsewhere, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            env=environment(RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE="2",
                            MASTER_ADDR="127.0.0.1", MASTER_PORT=str(21000 + os.getpid() % 9000)),
        )
        for rank in range(2)
    ]  # fmt: skip
    said = [rank.communicate(timeout=120)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], said
    assert json.loads((tmp_path / "run/summary.json").read_text())["steps"] == 5
    assert config.read_bytes() == planned
    config.write_bytes(planned + b"# edited\n")
    ran = pretrain_from(tmp_path / "run", cwd=tmp_path)
    assert ran.returncode == 2 and "was changed after the launch" in ran.stderr
    config.write_bytes(planned)
    ran = pretrain_from(tmp_path / "run", "train.stepz=3", cwd=tmp_path)
    assert ran.returncode == 2 and "train.stepz: is no key of this config" in ran.stderr
    (tmp_path / "run").rename(tmp_path / "moved")
    ran = pretrain_from(tmp_path / "moved", cwd=tmp_path)
    assert ran.returncode == 2 and "was that moved?" in ran.stderr and not (tmp_path / "run").exists()


@pytest.mark.slow("cluster")
def test_a_job_that_fails_before_its_first_row_keeps_what_was_planned(tmp_path):
    """It is started again from the same config.yaml."""
    done = launch(*SLURM, "cluster.submit=false", "run.dir=run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    before = {path.name for path in (tmp_path / "run").iterdir()}
    rank = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1",
            "GLOO_SOCKET_IFNAME": "nosuch0"}  # fmt: skip
    ran = pretrain_from(tmp_path / "run", "device=cuda", cwd=tmp_path, **rank)
    assert ran.returncode != 0
    assert before <= {path.name for path in (tmp_path / "run").iterdir()}


def test_a_job_that_starts_again_goes_on_from_what_it_named_until_it_has(tmp_path):
    named = tmp_path / "elsewhere/step_00000004"
    plain = {"run": {"dir": str(tmp_path)}, "checkpoint": {"resume": str(named)}}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(plain))
    read = read_run_config(tmp_path / "config.yaml", ["--run-config", "x", "--goes-on"])
    assert read["checkpoint"]["resume"] == str(named)
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"kind": "start", "step": 4, "checkpoint": str(named)}) + "\n")
    read = read_run_config(tmp_path / "config.yaml", ["--run-config", "x", "--goes-on"])
    assert read["checkpoint"]["resume"] == "auto"
    assert read_run_config(tmp_path / "config.yaml", [])["checkpoint"]["resume"] == str(named)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["data=indexed", "data.path=nowhere/t"], ["data.path=nowhere/t", "nowhere/t.idx does not exist here"]),
        (["data=indexed"], ["data.path is empty"]),
        (["data=hf", "data.path=no.jsonl"], ["data.path=no.jsonl", "no such file here", "check_files=false"]),
        (["data=hf", "data.path=d.jsonl", "data.tokenizer=no.model"], ["data.tokenizer=", "cannot be read"]),
        (["checkpoint.resume=gone"], ["checkpoint.resume=gone", "no such folder"]),
        (["data=indexed", "data.path=/inside/t", "cluster.mounts=[{tmp}/host:/inside]"], ["host/t.idx does not exist"]),
    ],
    ids=lambda item: item[0],
)
def test_what_a_launch_can_see_is_looked_at_before_a_job_waits(tmp_path, arguments, words):
    (tmp_path / "d.jsonl").write_text('{"text": "x"}\n')
    arguments = [argument.replace("{tmp}", str(tmp_path)) for argument in arguments]
    done = launch(*SLURM, "cluster.submit=false", *arguments, "run.dir=run", cwd=tmp_path)
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
    assert all(word in done.stderr for word in words), done.stderr
    assert not (tmp_path / "run").exists()


def test_a_folder_with_a_waiting_job_is_not_launched_into_again(tmp_path):
    stubs = tmp_path / "bin"
    stubs.mkdir()
    for name, text in (("sbatch", '[ "$1" = --test-only ] || echo 41'), ("squeue", "echo PENDING")):
        (stubs / name).write_text(f"#!/bin/sh\n{text}\n")
        (stubs / name).chmod(0o755)
    path = f"{stubs}:{os.environ['PATH']}"
    done = launch(*SLURM, "run.dir=run", cwd=tmp_path, PATH=path)
    assert done.returncode == 0 and "job 41" in done.stdout, done.stderr
    before = (tmp_path / "run/config.yaml").read_bytes()
    done = launch(*SLURM, "optimizer.lr=0.5", "run.dir=run", cwd=tmp_path, PATH=path)
    assert done.returncode == 2 and "job 41 (pending) runs there; end it first with scancel 41" in done.stderr
    assert (tmp_path / "run/config.yaml").read_bytes() == before
    (stubs / "squeue").write_text("#!/bin/sh\nexit 1\n")
    assert launch(*SLURM, "optimizer.lr=0.5", "run.dir=run", cwd=tmp_path, PATH=path).returncode == 0


def test_a_folder_behind_a_link_is_mounted_where_it_is(tmp_path):
    (tmp_path / "scratch/run").mkdir(parents=True)
    (tmp_path / "work").mkdir()
    (tmp_path / "work/runs").symlink_to(tmp_path / "scratch")
    found = own_mounts(tmp_path / "work", tmp_path / "work/runs/run")
    assert found == [f"{tmp_path}/{name}:{tmp_path}/{name}" for name in ("work", "scratch/run")]
    assert own_mounts(Path("/data/x"), given=["/data:/data:ro"]) == []
    assert own_mounts(Path("/data/x"), given=["/data:/other"]) == ["/data/x:/data/x"]


def test_questions_to_the_launch_are_answered(tmp_path):
    done = launch("--help", cwd=tmp_path)
    assert done.returncode == 0 and "cluster.mem " in done.stdout and "cluster.secrets" in done.stdout
    assert launch("--version", cwd=tmp_path).stdout.startswith("megaasync 0.")
    done = launch("cluster=slurm", "--cfg", "job", cwd=tmp_path)
    assert done.returncode == 0 and "signal_seconds: 120" in done.stdout


@pytest.mark.slow("cluster")
def test_one_line_from_raw_text_to_a_job(tmp_path):
    """The page's line, with a small vocabulary and without a cluster: the 10B plan, and files that the job reads."""
    page = (REPOSITORY / "docs/cluster.md").read_text()
    line = next(line for line in page.splitlines() if line.startswith("bash scripts/launch_from_text.sh"))
    line = line.replace("/data/text/", "texts/").replace("/data/tokens", "tokens")
    (tmp_path / "texts").mkdir()
    for name in "ab":
        rows = (
            json.dumps({"text": f"{name} {n}: " + " ".join(f"word{n * k % 89}" for k in range(60))}) for n in range(300)
        )
        (tmp_path / f"texts/{name}.jsonl").write_text("\n".join(rows))
    command = (
        f"cd {tmp_path} && {line.partition('#')[0].replace('scripts/', f'{REPOSITORY}/scripts/')} cluster.submit=false"
    )
    done = bash(command, tmp_path, PYTHON=sys.executable, VOCAB_SIZE="600", VALIDATION="0.05")
    assert done.returncode == 0, done.stderr
    assert "parameters 10,103,269,376" in done.stdout and "not submitted" in done.stdout
    (config,) = tmp_path.glob("runs/*/config.yaml")
    data = yaml.safe_load(config.read_text())["data"]
    train, validation = (IndexedDataset(tmp_path / data[key]) for key in ("path", "validation_path"))
    assert len(train) + len(validation) == 600 and 10 < len(validation) < 60
    assert bash(command, tmp_path, PYTHON=sys.executable).returncode == 0, "what is there is used again"
