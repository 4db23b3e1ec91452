"""What a gradient delay costs each optimizer, and what corrections give back: many small runs, tables, pictures.

    python tools/delay_study.py [study=headline|tuning|full|momentum|batch|depth|phases] [key=value ...]

Every run is `python -m megaasync.pretrain` with overrides of its own, one per core at a time (per GPU with
device=cuda). A run that is done is not made again: after a stop, the same command goes on. Results are in `out`, by
default runs/study/<study>: results.csv, table.md and PNG pictures. Runs are in `runs` beside it, shared by all studies.
The studies are tools/study/configs/study/*.yaml.
"""

import sys
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from megaasync.config import ConfigError, read
from megaasync.config.read import did_you_mean, listed

from ..command_line import check_output, one_message, wants_help
from .design import StudyOptions, check_options, runs_of
from .plots import write_plots
from .results import cells_of, chosen_lrs, write_tables
from .runner import Result, Runner, StudyError, read_result

_CONFIGS = Path(__file__).resolve().parent / "configs"


def read_options(arguments: list[str]) -> tuple[StudyOptions, dict[str, tuple[float | None, ...]]]:
    """The command line, and the paper's losses.

    Raises:
        ConfigError: names key, value and remedy.
    """
    names = sorted(path.stem for path in (_CONFIGS / "study").glob("*.yaml"))
    for argument in arguments:
        key, _, value = argument.partition("=")
        if key == "study" and value not in names:
            raise ConfigError(f"study={value}: unknown study{did_you_mean(value, names)}; choose {listed(names)}")
    with initialize_config_dir(str(_CONFIGS), version_base="1.3"):
        plain: dict[str, Any] = OmegaConf.to_container(compose("delay_study", arguments), resolve=True)
    plain.pop("lrs")  # are in the study by now
    paper = {name: tuple(values) for name, values in plain.pop("paper").items()}
    options = read(StudyOptions, plain)
    check_options(options)
    return options, paper


def run_study(options: StudyOptions, pool: Path) -> list[Result]:
    """All results; progress is shown on a terminal as a bar, else as lines.

    Args:
        options: the command line.
        pool: folder of the runs of all studies.
    """
    runs = runs_of(options)
    if options.report_only:
        found = [read_result(run, pool / run.folder) for run in runs]
        results = [result for result in found if result is not None]
        if not results:
            raise ConfigError(f"report_only=true: no finished run of this study in {pool}")
        return results
    runner = Runner(pool, workers=options.workers, device=options.device)
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, console=Console(stderr=True), disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task(options.study.name, total=len(runs))

        def report(result: Result, done: int, total: int, left: float) -> None:
            bar.update(task, completed=done)
            bar.console.print(
                f"{done}/{total}  {result.run.label}: {result.status}, validation loss {result.val_loss:.4f}, "
                f"{result.seconds:.0f} s  (left {left / 60:.0f} min)",
                highlight=False,
                soft_wrap=True,
            )

        return runner.run_all(runs, report)


def main() -> None:
    """Entry point."""
    if wants_help(StudyOptions, __doc__):
        return
    with one_message():
        options, paper = read_options(sys.argv[1:])
        study = options.study
        folder = Path(options.out or Path("runs") / "study" / study.name)
        check_output("out", folder, is_folder=True)
        try:
            results = run_study(options, folder.resolve().parent / "runs")
        except StudyError as error:
            print(f"error: {error}", file=sys.stderr)
            raise SystemExit(1) from None
        cells = cells_of(study, results)
        folder.mkdir(parents=True, exist_ok=True)
        table = write_tables(folder, study, results, paper)
        print(f"{study.title}\n\n{table}")
        if len(codes := {result.code for result in results}) > 1:
            print(f"made by {len(codes)} versions of the code (column code of results.csv); remove runs to renew them")
        if study.lr_grid:
            for optimizer, (lr, is_inside) in chosen_lrs(cells, next(iter(study.modes))).items():
                warning = "" if is_inside else "   <- at the end of the grid: widen study.lr_grid"
                print(f"study.lrs.{optimizer}={lr:g}{warning}")
        pictures = write_plots(folder, study, cells, results)
        print("written: " + ", ".join(str(path) for path in (folder / "results.csv", folder / "table.md", *pictures)))


if __name__ == "__main__":
    main()
