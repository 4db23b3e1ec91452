"""A resumed run goes on with the tokens, the tokenizer and the learning rates that it was begun with, or says so."""

import json
import shutil

import pytest

from tests.support.cli import TINY, metrics, pretrain, tool
from tests.support.restarts import numbers

DENSE = [
    *(item for item in TINY if ".moe." not in item and "data" not in item),
    "model=tiny_dense",
    "model.num_layers=1",
]
RUN = [*DENSE, "schedule=2bw", "optimizer=adamw", "checkpoint.interval=4"]


def write(path, texts):
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))


TEXTS = [f"document {i}: " + " ".join(f"word{(i * j) % 97}" for j in range(40)) for i in range(60)]


def test_rows_appended_before_a_resume_are_noticed(tmp_path):
    """They would give another tokenizer, and so other ids for the same words."""
    write(tmp_path / "d.jsonl", TEXTS)
    text = [*RUN, "data=hf", "data.path=d.jsonl", "model.vocab_size=450", "run.dir=run"]
    cache = str(tmp_path / "cache")
    assert (
        ran := pretrain(*text, "train.steps=4", "train.lr_schedule=constant", cwd=tmp_path, MEGAASYNC_CACHE=cache)
    ).status == 0, ran.err
    text += ["train.steps=6", "train.lr_schedule=constant"]
    write(tmp_path / "d.jsonl", [*TEXTS, *(f"quite other words {i} zebra quagga okapi" * 9 for i in range(60))])
    before = (tmp_path / "run/metrics.jsonl").read_bytes()
    ran = pretrain(*text, cwd=tmp_path, MEGAASYNC_CACHE=cache)
    assert ran.status == 2 and "data: the tokenizer is not that of checkpoint" in ran.message, ran.err
    keep = f"data.tokenizer={tmp_path}/run/tokenizer.model"
    ran = pretrain(*text, keep, cwd=tmp_path, MEGAASYNC_CACHE=cache)
    assert ran.status == 2 and "data: the training tokens are not those of checkpoint" in ran.message, ran.err
    assert (tmp_path / "run/metrics.jsonl").read_bytes() == before
    ran = pretrain(*text, keep, "checkpoint.override=true", cwd=tmp_path, MEGAASYNC_CACHE=cache)
    assert ran.status == 0, ran.err
    assert [row["step"] for row in metrics(tmp_path / "run")] == [1, 2, 3, 4, 5, 6]


@pytest.mark.slow("data")
def test_token_files_made_again_under_the_same_name_are_noticed_and_moved_ones_are_not(tmp_path):
    write(tmp_path / "d.jsonl", TEXTS)
    assert (
        tool(
            "train_tokenizer.py", "--input", "d.jsonl", "--vocab-size", "450", "--output", "t.model", cwd=tmp_path
        ).returncode
        == 0
    )
    make = ["preprocess_data.py", "--tokenizer", "t.model", "--output", "tokens", "--input"]
    assert tool(*make, "d.jsonl", cwd=tmp_path).returncode == 0
    indexed = [*RUN, "data=indexed", "model.vocab_size=450", "run.dir=run", "train.lr_schedule=constant"]
    assert (ran := pretrain(*indexed, "data.path=tokens", "train.steps=4", cwd=tmp_path)).status == 0, ran.err
    for suffix in (".bin", ".idx", ".manifest.json"):
        shutil.copy(tmp_path / f"tokens{suffix}", tmp_path / f"moved{suffix}")
    write(tmp_path / "d.jsonl", [text.replace("word", "drow") for text in TEXTS])
    assert tool(*make, "d.jsonl", cwd=tmp_path).returncode == 0
    ran = pretrain(*indexed, "data.path=tokens", "train.steps=6", cwd=tmp_path)
    assert ran.status == 2 and "data: the training tokens are not those of checkpoint" in ran.message, ran.err
    ran = pretrain(*indexed, "data.path=moved", "train.steps=6", cwd=tmp_path)
    assert ran.status == 0, ran.err


COSINE = [*RUN, "data=synthetic", "data.num_tokens=4000", "train.lr_schedule=cosine"]


@pytest.mark.slow("data")
def test_a_schedule_is_not_stretched_in_silence(tmp_path):
    """The lr would jump, and the update that the last row waits for would use another one than the row says."""
    ran = pretrain(*COSINE, "train.steps=8", "run.dir=run", cwd=tmp_path)
    assert ran.status == 0, ran.err
    shutil.copytree(tmp_path / "run", tmp_path / "stretched")
    ran = pretrain(*COSINE, "train.steps=12", "run.dir=run", cwd=tmp_path)
    assert ran.status == 2, ran.err
    for words in ("train.steps=12", "over 8 steps", "0.001", "train.lr_schedule_steps=8", "checkpoint.override=true"):
        assert words in ran.message
    kept = [*COSINE, "train.steps=12", "train.lr_schedule_steps=8"]
    assert (ran := pretrain(*kept, "run.dir=run", cwd=tmp_path)).status == 0, ran.err
    assert (ran := pretrain(*kept, "run.dir=whole", cwd=tmp_path)).status == 0, ran.err
    assert numbers(tmp_path / "run") == numbers(tmp_path / "whole")
    # with the override the new rates begin at the new rows: row 9's loss is of weights that updates 0 to 6 made, and
    # row 10 has update 7, which was pending, with the rate of row 8
    arguments = [*COSINE, "train.steps=12", "run.dir=stretched", "checkpoint.override=true"]
    assert (ran := pretrain(*arguments, cwd=tmp_path)).status == 0, ran.err
    stretched, whole = numbers(tmp_path / "stretched"), numbers(tmp_path / "whole")
    assert [row["loss"] for row in stretched[:10]] == [row["loss"] for row in whole[:10]]
    assert stretched[8]["lr"] > 2 * stretched[7]["lr"] and stretched[10]["loss"] != whole[10]["loss"]


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("train.seed=7", ["train.seed=7", "train.seed=0"]),
        ("train.warmup_steps=3", ["train.warmup_steps=3", "train.warmup_steps=0"]),
        ("train.clip_grad_norm=0.3", ["train.clip_grad_norm=0.3", "train.clip_grad_norm=1.0"]),
        ("train.final_lr_ratio=0.3", ["train.final_lr_ratio=0.3", "train.final_lr_ratio=0.1"]),
    ],
)
def test_what_decides_the_numbers_is_compared_at_a_resume(tmp_path, eight, setting, words):
    ran = pretrain(*COSINE, "train.steps=8", setting, f"checkpoint.resume={eight}", "run.dir=other", cwd=tmp_path)
    assert ran.status == 2 and all(word in ran.message for word in words), ran.err
    assert not (tmp_path / "other").exists()


@pytest.fixture(scope="module")
def eight(tmp_path_factory):
    cwd = tmp_path_factory.mktemp("eight")
    assert (ran := pretrain(*COSINE, "train.steps=8", "run.dir=run", cwd=cwd)).status == 0, ran.err
    return cwd / "run/checkpoints/step_00000004"
