"""One pretraining run from the command line: python -m megaasync.pretrain [group=choice] [key=value]."""

import importlib
import sys
import traceback
from pathlib import Path
from typing import Any

import yaml

from megaasync.config import ConfigError, TrainConfig, read, validate
from megaasync.data import DataError
from megaasync.distributed.environment import RankEnvironment, launched_environment
from megaasync.entry.hydra_app import CONFIG_ERROR_STATUS, fail, run_app
from megaasync.entry.run_folder import make_run_folder, release_run_folder
from megaasync.entry.spawn import Interrupted, RankFailed, spawn_ranks
from megaasync.observe.run_files import write_json, write_text

_INTERRUPTED_STATUS = 130


def _check_world(config: TrainConfig, environment: RankEnvironment | None) -> None:
    if environment is not None and environment.world_size != config.world_size:
        parallel = config.parallel
        raise ConfigError(
            f"parallel.pipeline={parallel.pipeline}: tensor({parallel.tensor}) x expert({parallel.expert}) x "
            f"pipeline({parallel.pipeline}) x data({parallel.data}) = {config.world_size} ranks, but "
            f"WORLD_SIZE={environment.world_size} were launched; set parallel.pipeline={environment.world_size} or "
            f"launch {config.world_size}"
        )


def _worker_module() -> Any:
    """The first import of torch; only once everything that can be wrong without it has been checked."""
    return importlib.import_module("megaasync.train.worker")


def _print_plan(config: TrainConfig) -> None:
    plan = importlib.import_module("megaasync.train.plan")
    print(plan.render_plan(plan.make_plan(config)))


def _prepare(config: TrainConfig, plain: dict[str, Any], *, is_first: bool) -> tuple[Any, Path | None]:
    """Data and run folder, on the rank or launcher that makes them."""
    prepare = importlib.import_module("megaasync.data.prepare")
    say = (lambda line: print(line, flush=True)) if is_first else (lambda line: None)
    prepared = prepare.prepare_data(config.data, vocab_size=config.model.vocab_size, say=say)
    if not is_first:
        return prepared, None
    label = f"{config.model.name}-{config.optimizer.name}-{config.schedule.name}"
    folder = make_run_folder(config.run.dir, label=label)
    plain["run"]["dir"] = str(folder)
    write_text(folder / "config.yaml", yaml.safe_dump(plain, sort_keys=False))
    return prepared, folder


def _release(folder: Path | None) -> None:
    if folder is not None:
        release_run_folder(folder)


def pretrain(plain: dict[str, Any]) -> None:
    """Run one config: checked first, then on as many ranks as the layout needs.

    Raises:
        SystemExit: 2 for the user's mistakes, 1 for a failed rank, 130 for an interrupt.
    """
    folder = environment = None
    try:
        environment = launched_environment()
        config = validate(read(TrainConfig, plain))
        if config.dry_run:
            _print_plan(config)
            return
        _check_world(config, environment)
        prepared, folder = _prepare(config, plain, is_first=environment is None or environment.rank == 0)
        if environment is None:
            spawn_ranks(_run_rank, (config, prepared, folder, plain), world_size=config.world_size)
        elif _worker_module().run_rank(environment, config, prepared, folder, plain) == "interrupted":
            raise Interrupted("interrupted")
    except (ConfigError, DataError) as error:
        _release(folder)
        if plain.get("debug") is True:
            traceback.print_exc()
        if isinstance(error, ConfigError) and environment is not None and environment.rank > 0:
            raise SystemExit(CONFIG_ERROR_STATUS) from None  # rank 0 says the same
        fail(str(error), status=CONFIG_ERROR_STATUS)
    except RankFailed as error:
        _release(folder)
        if error.details:
            print(error.details, file=sys.stderr)
        fail(str(error), status=CONFIG_ERROR_STATUS if error.is_user_error else 1)
    except (Interrupted, KeyboardInterrupt):
        if folder is not None and not (folder / "summary.json").exists():
            write_json(folder / "summary.json", {"status": "interrupted"})
        fail("interrupted" + ("" if folder is None else f"; the run folder is {folder}"), status=_INTERRUPTED_STATUS)


def _run_rank(environment: RankEnvironment, *args: Any) -> str:
    return _worker_module().run_rank(environment, *args)


def main() -> None:
    """Entry point."""
    run_app(pretrain)


if __name__ == "__main__":
    main()
