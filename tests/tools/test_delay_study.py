"""tools/delay_study.py: its runs are the product's, are not made twice, and its tables say what the runs said."""

import csv
import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from megaasync.config import Config, ConfigError, read, validate
from tests.support.cli import TINY, metrics, tool
from tests.support.tiers import slow_params
from tools.study.delay_study import read_options
from tools.study.design import Run, runs_of
from tools.study.results import cells_of, chosen_lrs, markdown_table
from tools.study.runner import Result
from tools.study.time_to_loss import speedups_of, steps_to, table

STUDIES = sorted(path.stem for path in (Path(__file__).parents[2] / "tools/study/configs/study").glob("*.yaml"))
SMALL = ("study.base=" + json.dumps([*TINY, "train.steps=6", "train.warmup_steps=2"]), "study.seeds=[5]")


@pytest.fixture(scope="module")
def studied(tmp_path_factory):
    folder = tmp_path_factory.mktemp("study")
    ran = tool("delay_study.py", *SMALL, "only=[muon]", "out=s", cwd=folder)
    assert ran.returncode == 0, ran.stderr
    return folder, ran


def made_with(run):
    return " ".join(json.loads((run / "study.json").read_text())["overrides"])


def test_every_run_is_the_products_own(studied):
    """Six steps of the executor each, by the product's metrics; the delay by its staleness; losses by its summary."""
    folder, _ = studied
    rows = list(csv.DictReader((folder / "s" / "results.csv").open()))
    assert [(row["optimizer"], row["mode"]) for row in rows] == [
        ("muon", mode) for mode in ("sync", "delayed", "delayed + EF")
    ]
    staleness = {"sync": 0, "delayed": 1, "delayed + EF": 1}
    for row in rows:
        (run,) = (r for r in (folder / "runs").iterdir() if r.is_dir() and made_with(r) == row["overrides"])
        steps = metrics(run)
        assert [step["step"] for step in steps] == [1, 2, 3, 4, 5, 6]
        assert steps[-1]["staleness"] == staleness[row["mode"]]
        summary = json.loads((run / "summary.json").read_text())
        assert float(row["val_loss"]) == summary["val_loss"] and int(row["steps"]) == summary["steps"] == 6
        assert ("EF" in row["mode"]) == bool(row["val_loss_x"])
    table = (folder / "s" / "table.md").read_text()
    for row in rows:
        assert f"{float(row['val_loss']):.4f}" in table
    for picture in ("losses.png", "curves.png"):
        assert (folder / "s" / picture).stat().st_size > 10_000


def test_finished_runs_are_kept_and_unfinished_ones_made_again(studied):
    folder, _ = studied
    runs = folder / "runs"
    kept, lost = sorted(path for path in runs.iterdir() if path.is_dir())[:2]
    before = (kept / "summary.json").stat().st_mtime_ns
    (lost / "study.json").unlink()  # as if it had been killed
    loss = json.loads((lost / "summary.json").read_text())["val_loss"]
    ran = tool("delay_study.py", *SMALL, "only=[muon]", "out=s", cwd=folder)
    assert ran.returncode == 0, ran.stderr
    assert [line.split()[0] for line in ran.stderr.splitlines() if "completed" in line] == ["3/3"]
    assert (kept / "summary.json").stat().st_mtime_ns == before
    assert json.loads((lost / "summary.json").read_text())["val_loss"] == loss
    again = tool("delay_study.py", *SMALL, "only=[muon]", "out=s", "report_only=true", cwd=folder)
    assert again.returncode == 0 and again.stdout == ran.stdout


def assert_is_what_its_labels_say(study, run, config):
    mode, schedule = run.mode, config.schedule
    assert (config.correction.name == "error_feedback") == ("EF" in mode)
    assert (config.correction.name == "taylor") == ("aylor" in mode)
    if "aylor" in mode:
        assert config.correction.strength == float(mode.split()[-1])
    assert (schedule.sync_start_steps > 0) == ("start" in mode)
    assert (schedule.sync_cooldown_steps > 0) == ("cooldown" in mode)
    if "growing" in mode:
        stages = int(run.variation)
        assert (schedule.name, config.parallel.virtual_stages) == ("interleaved_2bw", stages)
        assert schedule.delay == tuple(range(stages - 1, -1, -1))
    else:
        assert schedule.name == ("1f1b" if mode == "sync" else "2bw") and schedule.delay is None
    if study == "batch":
        assert config.train.global_batch_size == int(run.variation)
        assert config.train.global_batch_size * config.train.steps == 4800
    if study == "momentum":
        optimizer = config.optimizer
        assert (optimizer.momentum if run.optimizer == "muon" else optimizer.betas[0]) == float(run.variation)
    if study == "time_to_loss" and mode != "sync":
        assert config.train.steps == round(1200 * float(run.variation))


@pytest.mark.parametrize(
    "study", slow_params(STUDIES, kept=[STUDIES.index(name) for name in ("headline", "time_to_loss")], area="study")
)
def test_every_study_consists_of_valid_runs(study, tmp_path, monkeypatch):
    """Every run's overrides compose to a valid config: found out here, not after an hour."""
    from hydra import compose, initialize_config_dir
    from omegaconf import OmegaConf

    from megaasync.entry.hydra_app import config_folder

    options, _ = read_options([f"study={study}"])
    runs = runs_of(options)
    assert len({run.label for run in runs}) == len(runs)
    assert len({run.folder for run in runs}) == len({run.overrides for run in runs})
    seen, cells = set(), {}
    with initialize_config_dir(str(config_folder()), version_base="1.3"):
        for run in runs:
            key = run.mode, run.variation, run.optimizer
            # each mode and variation with one optimizer, each optimizer in one mode
            if key in seen or (run.optimizer != runs[0].optimizer and run.mode != runs[0].mode):
                continue
            seen.add(key)
            config = validate(
                read(Config, OmegaConf.to_container(compose("pretrain", list(run.overrides)), resolve=True))
            )
            assert config.optimizer.lr == pytest.approx(run.lr) and config.optimizer.weight_decay == 0.1
            assert config.train.seed == run.seed
            assert_is_what_its_labels_say(study, run, config)
            cells.setdefault((run.optimizer, run.variation), []).append(config)
    for configs in cells.values():  # but for what a mode is about, its runs are alike
        for config in configs[1:] if study != "time_to_loss" else configs[2:]:
            alike = {"schedule": configs[0].schedule, "correction": configs[0].correction}
            same_stages = replace(config.parallel, virtual_stages=configs[0].parallel.virtual_stages)
            first = configs[0] if study != "time_to_loss" else replace(configs[1], **alike)
            assert replace(config, **alike, parallel=same_stages) == first
            has_delay = not run.mode.startswith("sync")
            assert (config.schedule.name != "1f1b") == has_delay


def results(losses):
    """{(optimizer, mode, variation, lr): by seed} as results."""
    return [
        Result(Run(*key, seed, ()), "completed" if math.isfinite(loss) else "failed", loss, None, 1, 1, 1.0, Path(), "")
        for key, values in losses.items()
        for seed, loss in enumerate(values)
    ]


def test_gaps_are_means_of_differences_by_seed():
    options, paper = read_options(["study=headline"])
    found = results(
        {
            ("muon", "delayed", "", 0.1): (2.5, 3.6, 4.7),
            ("muon", "sync", "", 0.1): (2.0, 3.0, 4.0),
            ("muon", "delayed + EF", "", 0.1): (2.25, 3.25, 4.25),
            ("adamw", "sync", "", 0.1): (2.0, 2.0, 2.0),
            ("adamw", "delayed", "", 0.1): (2.0, math.inf, 2.0),
        }
    )
    adamw, muon = cells_of(options.study, found)
    assert muon.gaps["delayed"].mean == pytest.approx(0.6) and muon.gaps["delayed"].deviation == pytest.approx(0.1)
    assert muon.losses["sync"].deviation == pytest.approx(1.0)
    table = markdown_table(options.study, [adamw, muon], paper).splitlines()
    assert "diverged (1 of 3)" in table[2]
    assert "| +0.6000 ± 0.1000 | +0.2500 ± 0.0000 | 58 % | +0.012, +0.005; 58 % |" in table[3]


def test_the_least_loss_chooses_the_lr_and_an_end_of_the_grid_is_said():
    options, _ = read_options(["study=tuning"])
    found = results(
        {
            **{("muon", "sync", "", lr): (loss,) for lr, loss in ((0.1, 3.0), (0.2, 2.0), (0.4, math.inf))},
            **{("adamw", "sync", "", lr): (loss,) for lr, loss in ((0.1, 1.0), (0.2, 2.0), (0.4, 3.0))},
        }
    )
    assert chosen_lrs(cells_of(options.study, found), "sync") == {"adamw": (0.1, False), "muon": (0.2, True)}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["study=headlin"], "study=headlin: unknown study; did you mean headline"),
        (["only=[muonn]"], "only=muonn: unknown optimizer; did you mean muon"),
        (["workers=0"], "workers=0: must be at least 1"),
        (["study.seeds=[]"], r"study.seeds=\(\): at least one is needed"),
        (["+study.optimizers.mine=[]"], "study.lrs: no lr for mine; add study.lrs.mine"),
        (["+study.variations.x.muonn=[]"], "study.variations.x.muonn: unknown label"),
        (["study.seeds=3"], "study.seeds=3: expected a list"),
    ],
)
def test_wrong_studies_are_named(arguments, message):
    with pytest.raises(ConfigError, match=message):
        read_options(arguments)


def test_a_wrong_override_is_one_message(tmp_path):
    ran = tool("delay_study.py", 'study.base=["train.stepss=3"]', "only=[muon]", "study.seeds=[0]", cwd=tmp_path)
    assert ran.returncode == 1 and "train.stepss" in ran.stderr and "Traceback" not in ran.stderr
    ran = tool("delay_study.py", "nonsense=3", cwd=tmp_path)
    assert ran.returncode == 2 and "nonsense" in ran.stderr and "Traceback" not in ran.stderr


def test_steps_to_a_loss_are_interpolated():
    assert steps_to(2.0, {1.0: 2.2, 1.2: 2.1, 1.4: 1.9}) == pytest.approx(1.3)
    assert steps_to(2.0, {1.0: 1.9, 1.2: 1.8}) == 1.0
    assert steps_to(1.5, {1.0: 1.9, 1.2: 1.8}) is None


def test_each_mode_is_divided_by_its_own_throughput():
    rounds = [{"sync": 1.0, "delayed": 2.0, "delayed + EF": f} for f in (1.0, 4.0, 1.5)]
    losses = {("muon", mode): {1.0: loss, 1.2: loss - 0.2} for mode, loss in
              (("sync", 2.0), ("delayed", 2.2), ("delayed + EF", 2.1))}  # fmt: skip
    text, rows = table(losses, speedups_of(rounds))
    assert [row["time"] for row in rows] == pytest.approx([1.2 / 2.0, 1.1 / 1.5])
    assert "| 1.500 (1.000 to 4.000) | 0.733 (0.275 to 1.100) |" in text


@pytest.mark.slow("study")
def test_time_to_loss_measures_and_divides(tmp_path):
    (tmp_path / "results.csv").write_text(
        "optimizer,mode,variation,val_loss\n"
        + "".join(f"muon,{mode},{f},{loss}\n" for mode, f, loss in
                  (("sync", 1, 2.0), ("delayed", 1, 2.2), ("delayed", 1.2, 2.0), ("delayed", 1.2, 2.0)))
    )  # fmt: skip
    small = "model.hidden_size=16,model.ffn_hidden_size=16,model.seq_length=16,data=synthetic"
    ran = tool("tools.study.time_to_loss", "study=.", "rounds=1", "steps=10", f"overrides={small}", cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr
    written = json.loads((tmp_path / "time_to_loss.json").read_text())
    (one,), (row,) = written["rounds"], written["rows"]
    assert set(one) == {"sync", "delayed", "delayed + EF"}
    assert row["steps"] == pytest.approx(1.2) and row["speedup"] == pytest.approx(one["delayed"] / one["sync"])
    assert row["time"] == pytest.approx(1.2 * one["sync"] / one["delayed"])
    ran = tool("tools.study.time_to_loss", "study=nowhere", cwd=tmp_path)
    assert ran.returncode == 2 and "study=nowhere: no results.csv there" in ran.stderr
