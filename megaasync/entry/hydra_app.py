"""Hydra at the door: it composes the config and runs sweeps; its errors are rewritten into one message each.

Behind this file nobody knows that Hydra exists: the task gets a plain dict.
"""

import os
import re
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hydra
import yaml
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from megaasync.config import ConfigError, TrainConfig, did_you_mean, dotted_keys, listed
from megaasync.entry.console import tolerate_console
from megaasync.entry.text_values import quoted_override, read_text_as_written, yaml_mistake

CONFIG_ERROR_STATUS = 2
INTERRUPTED_STATUS = 130
_SWEEPS = ("-m", "--multirun")


def config_folder() -> Path:
    """The Hydra configs: beside the package in a checkout, inside it when installed."""
    package = Path(__file__).resolve().parent.parent
    inside = package / "hydra_configs"
    return inside if inside.is_dir() else package.parent / "hydra_configs"


def _groups() -> dict[str, list[str]]:
    return {
        folder.name: sorted(file.stem for file in folder.glob("*.yaml"))
        for folder in config_folder().iterdir()
        if folder.is_dir() and any(folder.glob("*.yaml"))
    }


SHOW_KEYS = "python -m megaasync.pretrain --cfg job shows all keys"


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """An error and what it came from."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def explain(error: BaseException, *, show_keys: str = SHOW_KEYS) -> str:
    """One message for a Hydra or OmegaConf error: key, value, remedy.

    Args:
        error: of Hydra or OmegaConf.
        show_keys: what tells of an unknown key's neighbours.
    """
    text = str(error)
    if (mistake := next((one for one in _chain(error) if isinstance(one, yaml.YAMLError)), None)) is not None:
        return yaml_mistake(mistake)
    if match := re.search(r"Could not find '([\w/]+)/([^'\n]*)'", text):
        group, choice = match.groups()
        choices = _groups().get(group, [])
        near = did_you_mean(choice, choices)
        return f"{group}={choice}: unknown {group}{near}; choose {listed(choices) if choices else '(none)'}"
    if match := re.search(r"full_key: (\S+)", text) or re.search(r"Could not override '([^'\n]+)'", text):
        key = match.group(1)
        known = dotted_keys(TrainConfig)
        if key in known:
            return f"{key}: cannot be set with these choices; its group is null or of another kind here"
        near = did_you_mean(key, known) or did_you_mean(key, _groups())
        return f"{key}: unknown key{near}; {show_keys}"
    match = re.search(r"(?:parsing override|override) '([^'\n]*)'", text)
    override = getattr(error, "override", None) or (match.group(1) if match else None)
    if override is not None:
        key, _, value = override.partition("=")
        return (
            f"{override}: cannot be read as key=value; give key=value, and quote values with special signs, as in "
            f"""'{key or "key"}="{value or "value"}"'"""
        )
    if "Ambiguous value for argument" in text and (match := re.search(r"argument '([^'\n]*)'", text)):
        return f"{match.group(1)}: several values make a sweep; add -m, or quote one value that holds a comma"
    if "Config group override must be" in text:
        empty = [a.partition("=")[0] for a in sys.argv[1:] if a.endswith("=null")]
        group = next((name for name in empty if name in _groups()), "group")
        return f"{group}=null: a choice is needed; choose {listed(_groups().get(group, ['one']))}"
    first = next((line.strip() for line in text.splitlines() if line.strip()), type(error).__name__)
    return f"config: {first}; python -m megaasync.pretrain --help shows groups and keys"


def fail(message: str, *, status: int) -> None:
    """Say it and leave.

    Raises:
        SystemExit: always.
    """
    print(f"error: {message}", file=sys.stderr, flush=True)
    raise SystemExit(status)


def _plain(config: DictConfig) -> dict[str, Any]:
    """The composed config as plain dicts, interpolations resolved."""
    try:
        return OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        key = getattr(error, "full_key", None)
        reason = str(error).splitlines()[0]
        raise ConfigError(f"{key or 'config'}: {reason}") from None


def current_overrides() -> tuple[str, ...]:
    """Of the run whose config was composed last, as the user typed them; in a sweep with the values of this run."""
    return tuple(HydraConfig.get().overrides.task)


def sweep_number() -> int | None:
    """Number of this run in its sweep; None outside of one."""
    hydra_config = HydraConfig.get()
    return hydra_config.job.num if hydra_config.mode == RunMode.MULTIRUN else None


class _Stop(KeyboardInterrupt):
    """An interrupt whose exit status is ours.

    Python ends itself by SIGINT, whatever the status, once a plain KeyboardInterrupt has left an `exec`, such as the
    ones that make dataclasses and named tuples.
    """


def run_app(task: Callable[[dict[str, Any]], None]) -> None:
    """Compose the config from the command line and call `task(config)` with a plain dict, once per sweep job.

    In a sweep with `run.dir` set, job n gets the folder run.dir/n. A run that fails does not cost the others: the
    sweep goes on, and its end says which ones failed.

    Raises:
        SystemExit: status 2 for a wrong config, or what the task decides.
    """
    tolerate_console()
    failed: list[tuple[str, int]] = []
    interrupts: list[int] = []

    def on_interrupt(number: int, *_: object) -> None:
        interrupts.append(number)
        raise _Stop

    def job(config: DictConfig) -> None:
        if HydraConfig.get().mode != RunMode.MULTIRUN:
            run_one(config)
            return
        try:
            run_one(config)
        except SystemExit as end:
            if end.code not in (1, CONFIG_ERROR_STATUS):
                raise
            number = HydraConfig.get().job.num
            failed.append((f"{number} ({' '.join(HydraConfig.get().overrides.task)})", end.code))

    def run_one(config: DictConfig) -> None:
        try:
            plain = _plain(config)
            number = sweep_number()
            run = plain.get("run")
            if number is not None and isinstance(run, dict) and isinstance(run.get("dir"), str):
                run["dir"] = str(Path(run["dir"]) / str(number))
        except ConfigError as error:
            fail(str(error), status=CONFIG_ERROR_STATUS)
        try:
            task(plain)
        except Exception:  # a fault of ours, not of Hydra's or the user's
            traceback.print_exc()
            raise SystemExit(1) from None

    is_sweep = any(argument in _SWEEPS for argument in sys.argv)
    # Hydra takes its flags before all overrides or after them, not between
    sys.argv[1:] = sorted(sys.argv[1:], key=lambda argument: argument not in _SWEEPS)
    # Without this Hydra prints its own message and a stack trace hint; with it we get the exception.
    os.environ["HYDRA_FULL_ERROR"] = "1"
    read_text_as_written()
    sys.argv[1:] = [quoted_override(argument) for argument in sys.argv[1:]]
    app = hydra.main(version_base="1.3", config_path=str(config_folder()), config_name="pretrain")(job)
    try:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
            if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup does
                signal.signal(number, on_interrupt)
        if not is_sweep:
            app()
        else:  # Hydra writes its own record of a sweep; every run has its config.yaml
            with tempfile.TemporaryDirectory() as scratch:
                sys.argv.append(f"hydra.sweep.dir={scratch}")
                app()
    except KeyboardInterrupt:
        fail("interrupted", status=INTERRUPTED_STATUS)
    except Exception as error:
        if interrupts:  # OmegaConf turns an interrupt inside it into an error of its own
            fail("interrupted", status=INTERRUPTED_STATUS)
        if "debug=true" in sys.argv:
            traceback.print_exc()
        fail(explain(error), status=CONFIG_ERROR_STATUS)
    if failed:
        fail("these runs of the sweep failed: " + ", ".join(name for name, _ in failed), status=failed[0][1])
