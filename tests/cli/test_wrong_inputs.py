"""Wrong inputs end with status 2 and one message that names key, value and remedy; none shows a traceback."""

import os

import pytest

from tests.support.cli import TINY, pretrain, refused

# arguments; words that the message must hold (key, value, remedy)
CONFIG_ERRORS = [
    (["train.stepss=3"], ["train.stepss", "did you mean train.steps"]),
    (["modle.num_layers=3"], ["modle.num_layers", "did you mean model.num_layers"]),
    (["nonsense.key=2"], ["nonsense.key", "unknown key", "--cfg job"]),
    (["+train.momentum=3"], ["train.momentum=3", "unknown key", "known keys"]),
    (["optimizer=adamww"], ["optimizer=adamww", "did you mean adamw", "muon, nadam, normuon, sgd, soap or torch"]),
    (["schedule=3bw"], ["schedule=3bw", "did you mean 2bw", "1f1b, 2bw, gpipe"]),
    (["model=tiny_mo"], ["model=tiny_mo", "did you mean tiny_moe"]),
    (["correction=feedback"], ["correction=feedback", "error_feedback"]),
    (["data=hugging"], ["data=hugging", "python_stdlib"]),
    (["train.steps=many"], ["train.steps='many'", "whole number"]),
    (["train.steps=-5"], ["train.steps=-5", "at least 1"]),
    (["optimizer.betas=0.9"], ["optimizer.betas=0.9", "[0.9,0.95]"]),
    (["optimizer=sgd", "optimizer.gamma=0.9"], ["optimizer.gamma", "of optimizer=mars; set optimizer=mars"]),
    (["train.dtype=float16"], ["train.dtype=float16", "bfloat16"]),
    (["train.global_batch_size=15"], ["train.global_batch_size=15", "multiple of", "=16"]),
    (
        ["parallel.pipeline=4", "train.global_batch_size=8"],
        ["train.global_batch_size=8", "m = 2", "m >= P - 1 = 3", "deadlock", "set train.global_batch_size=12"],
    ),
    (
        ["schedule=pipedream", "parallel.pipeline=2"],
        ["schedule=pipedream", "defined for m = 1", "m = 4", "set train.micro_batch_size=16"],
    ),
    (["schedule=zbv", "parallel.pipeline=3"], ["parallel.pipeline=3", "2 stages per rank = 6", "at most 2"]),
    (["schedule=gpipe", "schedule.extra_in_flight=1"], ["gpipe", "set schedule.extra_in_flight=0"]),
    (["schedule=1f1b", "schedule.sync_start_steps=4"], ["synchronous all the time", "set schedule.sync_start_steps=0"]),
    (
        ["parallel.pipeline=2", "parallel.layers_per_stage=[3,3]"],
        ["parallel.layers_per_stage=[3, 3]", "2 numbers", "sum to model.num_layers=5", "null"],
    ),
    (["model.num_heads=5"], ["model.num_heads=5", "must divide model.hidden_size=128"]),
    (["parallel.pipeline=9"], ["parallel.pipeline=9", "model.num_layers=5", "at most 5"]),
    (["parallel.data=auto", "parallel.tensor=0"], ["parallel.tensor=0", "at least 1"]),
    (["parallel.data=auto", "cluster=slurm", "cluster.nodes=0", "dry_run=true"], ["cluster.nodes=0", "at least 1"]),
    (["parallel.tensor=4"], ["parallel.tensor=4", "model.num_kv_heads", "set parallel.tensor=2"]),
    (["schedule=1f1b", "correction=error_feedback"], ["correction=error_feedback", "schedule=1f1b", "schedule=2bw"]),
    (["data=indexed"], ["data.path is empty", "set data.path"]),
    (["train.steps=[1"], ["train.steps=[1", "quote"]),
    (["run.dir=a=b"], ["run.dir=a=b", "quote", "'run.dir=\"a=b\"'"]),
    (["just-words"], ["just-words", "key=value"]),
    (["optimizer.lr=nan"], ["optimizer.lr=nan", "finite number"]),
    (["model.norm_eps=-1"], ["model.norm_eps=-1", "above 0"]),
    (["lr=0.1"], ["lr", "did you mean optimizer.lr"]),
    (["optimizer=null"], ["optimizer=null", "muon, nadam, normuon, sgd, soap or torch"]),
    (["schedule=1f1b,2bw"], ["schedule", "add -m"]),
    (["optimizer.name=[1]"], ["optimizer", "choose"]),
    (["data=hf", "data.path=x.jsonl", "data.split=foo"], ["data.split=foo", "set data.split=train"]),
    (["train.time_limit=0"], ["train.time_limit=0", "above 0", "null"]),
    (["checkpoint.keep=0"], ["checkpoint.keep=0", "at least 1"]),
    (["run.max_restarts=2", "checkpoint.interval=null"], ["run.max_restarts=2", "set checkpoint.interval"]),
    (["logging.spike_threshold=-1"], ["logging.spike_threshold=-1", "above 0", "null"]),
    (["train.on_nonfinite=ignore"], ["train.on_nonfinite=ignore", "stop", "skip"]),
    (["train.clip_grad_norm=0"], ["train.clip_grad_norm=0", "null"]),
]


def check(ran, words):
    assert ran.status == 2, ran.err
    assert "Traceback" not in ran.err + ran.out
    lines = ran.err.strip().splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: "), ran.err
    for word in words:
        assert word in lines[0], f"{word!r} is not in {lines[0]!r}"


@pytest.mark.parametrize(("arguments", "words"), CONFIG_ERRORS, ids=lambda v: v[-1] if isinstance(v, list) else None)
def test_config_errors(tmp_path, arguments, words):
    """Within seconds, which is to say: before torch is imported, let alone a rank started."""
    ran = refused(*arguments, cwd=tmp_path)
    check(ran, words)
    assert "hydra" in ran.loaded and "torch" not in ran.loaded
    assert list(tmp_path.iterdir()) == [], "a wrong config left something behind"


def test_debug_shows_the_traceback(tmp_path):
    ran = pretrain("train.steps=-5", "debug=true", cwd=tmp_path)
    assert ran.status == 2
    assert "Traceback" in ran.err
    assert ran.message.startswith("error: train.steps=-5")


def files(tmp_path):
    (tmp_path / "empty.txt").write_bytes(b"")
    (tmp_path / "cut.jsonl").write_text('{"text": "hello"\n')
    (tmp_path / "nested.jsonl").write_text('{"text": {"a": 1}}\n' * 3)
    (tmp_path / "latin.jsonl").write_bytes(b'{"text": "ok"}\n{"text": "caf\xe9"}\n')
    (tmp_path / "few.txt").write_text("hello world\n\nhello again\n")
    (tmp_path / "file").write_text("not a folder")
    return tmp_path


FILE_ERRORS = [
    (["data=hf", "data.path=nobody/nothing"], ["data.path=nobody/nothing", "cannot read it", "check the name"]),
    (["data=hf", "data.path={tmp}/cut.jsonl"], ["cut.jsonl, line 1, column 17", "is not JSON", "check the file"]),
    (["data=hf", "data.path={tmp}/nested.jsonl"], ["data.text_field=text", "line 1", "holds dict, not text"]),
    (["data=indexed", "data.path=/nowhere/tokens"], ["data.path=/nowhere/tokens", "does not exist", ".bin and .idx"]),
    (["data=hf", "data.path=/nowhere/x.txt"], ["data.path=/nowhere/x.txt", "no such file"]),
    (["data=hf", "data.path={tmp}/empty.txt"], ["data.path=", "empty.txt", "the file is empty"]),
    (["data=hf", "data.path={tmp}/latin.jsonl"], ["latin.jsonl, line 2", "0xe9", "data.on_bad_bytes=replace"]),
    (
        ["data=hf", "data.path={tmp}/latin.jsonl", "data.text_field=body", "data.on_bad_bytes=replace"],
        ["data.text_field=body", "it has text"],
    ),
    (
        ["data=hf", "data.path={tmp}/few.txt", "data.tokenizer=/no.model"],
        ["data.tokenizer=/no.model", "cannot be read"],
    ),
    (["data=synthetic", "run.dir=/proc/nowhere/run"], ["run.dir=/proc/nowhere/run", "cannot be written"]),
    (["data=synthetic", "run.dir={tmp}/file"], ["run.dir=", "file"]),
    (["data=synthetic", "checkpoint.resume=nowhere"], ["checkpoint.resume=nowhere", "no such folder", "list FOLDER"]),
    (["data.cache_dir=/proc/nowhere"], ["data.cache_dir=/proc/nowhere", "another folder"]),
]


@pytest.mark.parametrize(
    ("arguments", "words"), FILE_ERRORS, ids=lambda v: v[-1][-25:] if isinstance(v, list) else None
)
def test_file_errors(tmp_path, arguments, words):
    files(tmp_path)
    given = [argument.format(tmp=tmp_path) for argument in arguments]
    cache = (
        []
        if any("cache_dir" in a or "synthetic" in a or "indexed" in a for a in given)
        else [f"data.cache_dir={tmp_path}/cache"]
    )
    ran = pretrain(*given, *cache, cwd=tmp_path)
    check(ran, words)


def test_a_folder_that_holds_a_run_is_refused(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text("{}\n")
    check(pretrain("data=synthetic", "run.dir=run", cwd=tmp_path), ["run.dir=run", "holds a run already", "another"])
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == "{}\n"


def test_an_error_on_the_ranks_frees_the_folder(tmp_path):
    """A GPU that is not there, and data too short for one sequence, are found out by the ranks."""
    import torch

    if not torch.cuda.is_available():
        ran = pretrain(*TINY[:-1], "device=cuda", "run.dir=run", cwd=tmp_path)
        check(ran, ["device=cuda", "set device=cpu"])
        assert not (tmp_path / "run").exists()
    files(tmp_path)
    arguments = ["data=hf", f"data.path={tmp_path}/few.txt", f"data.cache_dir={tmp_path}/cache", "device=cpu"]
    ran = pretrain(*arguments, "run.dir=run", "parallel.pipeline=2", cwd=tmp_path)
    check(ran, ["model.seq_length + 1 = 129", "smaller model.seq_length"])
    assert not (tmp_path / "run").exists()


def test_a_layout_that_is_not_the_launched_ranks(tmp_path):
    place = {"RANK": "0", "WORLD_SIZE": "3", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    ran = pretrain("parallel.pipeline=2", cwd=tmp_path, **place)
    check(ran, ["parallel.data=1", "pipeline(2)", "= 2 ranks", "WORLD_SIZE=3", "launch 2"])


def test_launch_variables_that_are_no_numbers(tmp_path):
    check(pretrain("train.steps=1", cwd=tmp_path, RANK="x", WORLD_SIZE="2"), ["RANK=x", "whole number"])
    check(pretrain("parallel.pipeline=2", cwd=tmp_path, RANK="0", WORLD_SIZE="2"), ["WORLD_SIZE=2", "MASTER_ADDR"])


def test_values_with_equal_signs_and_other_letters_work_quoted(tmp_path):
    folder = "a=b,ü 漢#|$x"
    ran = pretrain(*TINY, "train.steps=1", f'run.dir="{folder}"', cwd=tmp_path)
    assert ran.status == 0, ran.err
    assert (tmp_path / folder / "summary.json").exists()
    assert os.listdir(tmp_path) == [folder]
