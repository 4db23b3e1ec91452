"""Wrong inputs to the tools end with status 2 and one last line that names key, value and remedy; no traceback."""

import pytest

from tests.support.cli import tool

# command; words that the last line must hold
ROWS = [
    ("train_tokenizer.py", [], ["required: --input, --vocab-size, --output"]),
    ("train_tokenizer.py", ["--input", "no.txt", "--vocab-size", "500", "--output", "t"], ["--input no.txt", "give a"]),
    ("train_tokenizer.py", ["--input", "t", "--vocab-size", "9", "--output", "t"], ["--vocab-size 9", "at least 400"]),
    (
        "train_tokenizer.py",
        ["--input", "few.txt", "--vocab-size", "500", "--output", "/proc/no/t"],
        ["--output=/proc/no", "another place"],
    ),
    (
        "preprocess_data.py",
        ["--input", "few.txt", "--tokenizer", "no.model", "--output", "x"],
        ["no.model", "cannot be read"],
    ),
    ("draw_schedule.py", ["schedule=3bw"], ["schedule=3bw", "did you mean 2bw", "choose ", "gpipe"]),
    ("draw_schedule.py", ["schedule=pipedream"], ["schedule=pipedream", "defined for m = 1"]),
    ("draw_schedule.py", ["steps=3-x"], ["steps=3-x", "a number or a range"]),
    ("draw_schedule.py", ["stages=0"], ["stages=0", "at least 1"]),
    ("draw_schedule.py", ["microbatches=two"], ["microbatches='two'", "whole number"]),
    ("draw_schedule.py", ["nonsense"], ["nonsense", "key=value"]),
    ("draw_schedule.py", ["stagess=3"], ["stagess", "did you mean stages"]),
    ("draw_schedule.py", ["out=x.gif"], ["out=x.gif", ".svg or .png"]),
    ("draw_schedule.py", ["out=/proc/x.svg"], ["out=/proc/x.svg", "another place"]),
    ("draw_schedule.py", ["trace=nowhere"], ["trace=nowhere", "logging.trace=true"]),
    ("draw_schedule.py", ["trace=few.txt"], ["trace=few.txt", "is not a trace.json"]),
    ("bench_pipeline.py", ["schedules=nope"], ["schedules=nope", "choose ", "gpipe"]),
    ("bench_pipeline.py", ["steps=0"], ["steps=0", "at least 5"]),
    ("bench_pipeline.py", ["ranks=0"], ["ranks=[0]", "at least 1"]),
    ("bench_pipeline.py", ["out=few.txt"], ["out=few.txt", "is a file"]),
    ("tools.bench.measure_plan", ["model.hidden=3"], ["model.hidden", "did you mean model.hidden_size"]),
    ("tools.bench.measure_plan", ["train.steps=-1"], ["train.steps=-1", "at least 1"]),
    ("delay_study.py", ["study=none"], ["study=none", "choose batch"]),
    ("delay_study.py", ["seeds=3"], ["seeds", "unknown key", "delay_study.py --help"]),
    ("delay_study.py", ["only=[adamm]"], ["adamm", "adamw"]),
    ("delay_study.py", ["workers=0"], ["workers=0", "at least 1"]),
    ("delay_study.py", ["out=/proc/x"], ["out=/proc/x", "another place"]),
    ("tools.study.delay_theory", ["steps=1"], ["steps=1", "at least 16"]),
    ("tools.study.delay_theory", ["problems=cubic"], ["problems=cubic", "choose quadratic"]),
    ("tools.study.delay_theory", ["out=/proc/x"], ["out=/proc/x", "another place"]),
    ("tools.study.time_to_loss", ["rounds=0"], ["rounds=0", "at least 1"]),
    ("tools.study.time_to_loss", ["study=nowhere"], ["study=nowhere", "no results.csv"]),
    ("tools.study.quickstart", ["train.stepss=3"], ["train.stepss", "did you mean train.steps"]),
    ("megaasync.checkpoint", ["list", "nowhere"], ["nowhere", "no such folder"]),
    ("megaasync.checkpoint", ["describe", "."], ["no checkpoints in it", "give a run folder"]),
    ("megaasync.checkpoint", ["lst", "."], ["'lst'", "'list', 'verify', 'describe'"]),
]


@pytest.mark.parametrize(("name", "arguments", "words"), ROWS, ids=[f"{r[0]} {' '.join(r[1])}" for r in ROWS])
def test_a_wrong_input_is_one_message(tmp_path, name, arguments, words):
    (tmp_path / "few.txt").write_text("hello world\n")
    ran = tool(name, *arguments, cwd=tmp_path)
    assert ran.returncode == 2 and "Traceback" not in ran.stdout + ran.stderr, ran.stderr
    last = ran.stderr.strip().splitlines()[-1]
    assert "error: " in last
    for word in words:
        assert word in last, f"{word!r} is not in {last!r}"
    assert [path.name for path in tmp_path.iterdir()] == ["few.txt"], "something was left behind"
