"""Hydra at the door: it composes the config and runs sweeps; its errors are rewritten into one message each.

Behind this file nobody knows that Hydra exists: the task gets a plain dict.
"""

import json
import os
import re
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, is_dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, get_args

import hydra
import yaml
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from megaasync.cluster.script import hydra_quoted
from megaasync.config import Config, ConfigError, did_you_mean, dotted_keys, listed
from megaasync.config.secrets import is_secret, redacted, take_secrets
from megaasync.distributed.environment import variables
from megaasync.distributed.interrupts import NotedInterrupts, Stop, note_interrupts
from megaasync.entry.console import fail_if_unread, tolerate_console
from megaasync.entry.help import answer_questions, config_folder, groups
from megaasync.entry.text_values import quoted_override, read_text_as_written, yaml_mistake
from megaasync.fields import hints_of
from megaasync.observe.run_files import write_json

CONFIG_ERROR_STATUS = 2
INTERRUPTED_STATUS = 130
_SWEEPS = ("-m", "--multirun")
_WITH_VALUE = frozenset(
    {"--config-dir", "-cd", "--config-name", "-cn", "--config-path", "-cp", "--cfg", "-c", "--package", "-p",
     "--experimental-rerun"}
)  # fmt: skip


SHOW_KEYS = "python -m megaasync.pretrain --cfg job shows all keys"


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """An error and what it came from."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _where_it_is(key: str) -> str:
    """Which choices of a group have a key."""
    group = key.partition(".")[0]
    names = [
        get_args(hints_of(option)["name"])[0]
        for option in get_args(hints_of(Config)[group])
        if is_dataclass(option) and key.partition(".")[2].partition(".")[0] in hints_of(option)
    ]
    if not names:
        return "; its group is null here"
    return f", but of {group}={listed(names)}; set {group}={names[0]} to use it"


def explain(error: BaseException, *, show_keys: str = SHOW_KEYS) -> str:
    """One message for a Hydra or OmegaConf error: key, value, remedy.

    Args:
        error: of Hydra or OmegaConf.
        show_keys: what tells of an unknown key's neighbours.
    """
    text = str(error)
    if (mistake := next((link for link in _chain(error) if isinstance(link, yaml.YAMLError)), None)) is not None:
        return yaml_mistake(mistake)
    if match := re.search(r"Could not find '([\w/]+)/([^'\n]*)'", text):
        group, choice = match.groups()
        choices = groups().get(group, [])
        near = did_you_mean(choice, choices)
        return f"{group}={choice}: unknown {group}{near}; choose {listed(choices) if choices else '(none)'}"
    if match := re.search(r"full_key: (\S+)", text) or re.search(r"Could not override '([^'\n]+)'", text):
        key = match.group(1)
        known = dotted_keys(Config)
        if key in known:
            return f"{key}: is no key of what is chosen here{_where_it_is(key)}"
        near = did_you_mean(key, known) or ("" if "." in key else did_you_mean(key, groups()))
        group = key.partition(".")[0]
        beside = sorted(
            sibling.partition(".")[2]
            for sibling in known
            if sibling.startswith(f"{group}.") and sibling.count(".") == 1
        )
        there = f"; {group} has {listed(beside)}" if beside and not near else ""
        return f"{key}: unknown key{near}{there}; {show_keys}"
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
        group = next((name for name in empty if name in groups()), "group")
        return f"{group}=null: a choice is needed; choose {listed(groups().get(group, ['one']))}"
    first = next((line.strip() for line in text.splitlines() if line.strip()), type(error).__name__)
    return f"config: {first}; python -m megaasync.pretrain --help shows groups and keys"


def fail(message: str, *, status: int) -> None:
    """Print it, without secrets, and exit. What was asked for, as an interrupt, is no error.

    Raises:
        SystemExit: always.
    """
    prefix = "" if status == INTERRUPTED_STATUS else "error: "
    print(prefix + redacted(message, variables()), file=sys.stderr, flush=True)
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
    """Overrides of the run whose config was composed last, as typed; in a sweep with this run's values."""
    return tuple(redacted(override, variables()) for override in HydraConfig.get().overrides.task)


def sweep_number() -> int | None:
    """Number of this run in its sweep; None outside of one."""
    hydra_config = HydraConfig.get()
    return hydra_config.job.num if hydra_config.mode == RunMode.MULTIRUN else None


class RunStopped(SystemExit):
    """A run of a sweep ended early by itself, as at its time limit: the others go on."""


def _given(argument: str) -> Any:
    """The value of an override, as Hydra and OmegaConf make it; None for null."""
    override = OverridesParser.create().parse_override(argument)
    value = override.value()
    return OmegaConf.to_container(OmegaConf.create({"it": value}), resolve=True)["it"]


def _note_secrets(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Arguments without the values of secrets, which go into the environment; and the secrets' names."""
    kept, names = [], []
    for argument in arguments:
        key, equals, _ = argument.partition("=")
        plain_key = key.lstrip("+")
        name = plain_key.removeprefix("cluster.env.")
        if not equals or not (plain_key == "cluster.env" or (name != plain_key and is_secret(name))):
            kept.append(argument)
            continue
        try:
            value = _given(argument)
        except (HydraException, OmegaConfBaseException):
            kept.append(argument)  # Hydra says what is wrong with it
            continue
        found = {name: value} if plain_key != "cluster.env" else value if isinstance(value, dict) else {}
        secrets = {str(variable): text for variable, text in found.items() if is_secret(str(variable))}
        names += secrets
        variables().update({secret: str(text) for secret, text in secrets.items() if text is not None})
        rest = {variable: text for variable, text in found.items() if str(variable) not in secrets}
        if plain_key == "cluster.env" and not secrets:
            kept.append(argument)
        elif rest:
            texts = ",".join(f"{variable}:{hydra_quoted(str(text))}" for variable, text in rest.items())
            kept.append(f"{key}={{{texts}}}")
    return kept, names


@dataclass(frozen=True, slots=True)
class _Job:
    """What Hydra calls for every config, here or in a process of one of its launchers: it must survive pickling.

    Attributes:
        task: gets the plain config, and `on_folder` if it reports its run folder.
        secrets: names that the command line gave.
        records: folder for what became of the runs of a sweep; None outside of one.
    """

    task: Callable[..., None]
    secrets: tuple[str, ...]
    records: Path | None
    reports_folder: bool = False

    def __call__(self, config: DictConfig) -> None:
        """Run one config; a run of a sweep that fails leaves a record and does not cost the others."""
        if self.records is None:
            self._run(config, {})
            return
        number, facts = HydraConfig.get().job.num, {"folder": None}
        status = 1
        try:
            self._run(config, facts)
            status = 0
        except RunStopped as end:
            status = end.code
        except SystemExit as end:
            status = end.code if isinstance(end.code, int) else 1
            if status not in (1, CONFIG_ERROR_STATUS):
                raise
        finally:
            record = {"number": number, "overrides": list(current_overrides()), "status": status, **facts}
            self.records.mkdir(parents=True, exist_ok=True)
            write_json(self.records / f"{number}.json", record)

    def _run(self, config: DictConfig, facts: dict[str, Any]) -> None:
        plain: dict[str, Any] = {}
        try:
            plain = _plain(config)
            cluster = plain.get("cluster")
            if self.secrets and isinstance(cluster, dict):
                cluster["secrets"] = [*(cluster.get("secrets") or []), *self.secrets]
            variables().update(take_secrets(plain, variables()))
            number, run = sweep_number(), plain.get("run")
            if number is not None and isinstance(run, dict) and isinstance(run.get("dir"), str):
                run["dir"] = facts["folder"] = str(Path(run["dir"]) / str(number))
        except ConfigError as error:
            fail(str(error), status=CONFIG_ERROR_STATUS)
        try:
            if self.reports_folder:
                self.task(plain, on_folder=lambda folder: facts.update(folder=str(folder)))
            else:
                self.task(plain)
        except Exception:  # a fault of ours, not of Hydra's or the user's
            traceback.print_exc()
            raise SystemExit(1) from None


def _flags_first(arguments: Sequence[str]) -> list[str]:
    """Flags before overrides, each with its value: Hydra takes them before all overrides or after them, not between."""
    flags, overrides = [], []
    words = iter(arguments)
    for word in words:
        if not word.startswith("-"):
            overrides.append(word)
            continue
        flags.append(word)
        if word in _WITH_VALUE and (value := next(words, None)) is not None:
            flags.append(value)
    return flags + overrides


def _records_folder(arguments: Sequence[str]) -> Path:
    """Where a sweep keeps its launcher's logs and what became of its runs: below run.dir, else beside the runs."""
    given = [argument.partition("=")[2] for argument in arguments if argument.startswith("hydra.sweep.dir=")]
    wanted = [argument.partition("=")[2].strip("\"'") for argument in arguments if argument.startswith("run.dir=")]
    if given:
        return Path(given[-1])
    if wanted and "," not in wanted[-1]:
        return Path(wanted[-1]).expanduser() / "sweep"
    return Path("runs") / f"{datetime.now():%Y%m%d-%H%M%S}-{os.getpid()}-sweep"


def _count_runs(arguments: Sequence[str]) -> int:
    """Runs of a sweep by the overrides of its command line; at least one, whatever another sweeper makes of them."""
    words = [argument for argument in arguments if "=" in argument and not argument.startswith(("-", "hydra"))]
    batches = BasicSweeper.split_arguments(OverridesParser.create().parse_overrides(words), None)
    return max(sum(map(len, batches)), 1)


def _end_sweep(records: Path, *, expected: int, task_is_collected: bool) -> None:
    """Print what became of the runs of a sweep.

    Args:
        records: folder with a file for each run that came to an end, good or bad.
        expected: number of runs; one without a record died, as where a launcher's process cannot load it.
        task_is_collected: there is nothing to print.

    Raises:
        SystemExit: a run failed, or left no record because its process died.
    """
    found = [json.loads(path.read_text()) for path in records.glob("[0-9]*.json")]
    rows = sorted(found, key=lambda row: row["number"])
    missing = sorted(set(range(expected)) - {row["number"] for row in rows})
    failed = [row for row in rows if row["status"] in (1, CONFIG_ERROR_STATUS)]
    if not task_is_collected:
        for row in rows:
            loss = _validation_loss(row.get("folder"))
            status = "failed" if row in failed else "stopped" if row["status"] else "done"
            values = " ".join(row["overrides"])
            print(f"{row['number']:>4}  {status:7}  validation loss {loss:8}  {row.get('folder')}  {values}")
    if failed or missing:
        names = [f"{row['number']} ({' '.join(row['overrides'])})" for row in failed]
        names += [f"{number} (its process died; logs are in {records})" for number in missing]
        fail("these runs of the sweep failed: " + ", ".join(names), status=failed[0]["status"] if failed else 1)


def _validation_loss(folder: str | None) -> str:
    try:
        loss = json.loads((Path(folder or "") / "summary.json").read_text()).get("val_loss")
    except (OSError, ValueError, AttributeError):
        return "-"
    return f"{loss:.4f}" if isinstance(loss, float) else "-"


def run_app(
    task: Callable[..., None], *, name: str = "pretrain", collects: bool = False, reports_folder: bool = False
) -> None:
    """Compose the config from the command line and call `task(config)` with a plain dict, once per sweep job.

    In a sweep with `run.dir` set, job n gets the folder run.dir/n. A run that fails does not cost the others: the
    sweep goes on, its end says which ones failed, and fails too. Hydra's launchers may run jobs in other processes.

    Args:
        task: importable by name.
        name: of the command, for --help.
        collects: the task only gathers the configs; the sweep itself has nothing to tell.
        reports_folder: the task takes `on_folder`, and calls it with its run folder.

    Raises:
        SystemExit: status 2 for a wrong config, or what the task decides.
    """
    tolerate_console()
    interrupts = NotedInterrupts()
    answer_questions(sys.argv[1:], name=name)
    is_sweep = any(argument in _SWEEPS for argument in sys.argv)
    sys.argv[1:], secrets = _note_secrets(sys.argv[1:])
    sys.argv[1:] = [quoted_override(argument) for argument in sys.argv[1:]]
    sys.argv[1:] = _flags_first(sys.argv[1:])
    # Without this Hydra prints its own message and a stack trace hint; with it we get the exception.
    os.environ["HYDRA_FULL_ERROR"] = "1"
    read_text_as_written()
    with tempfile.TemporaryDirectory() as scratch:
        records = None
        if is_sweep:
            is_elsewhere = any(argument.startswith(("hydra/launcher=", "hydra.sweep.dir=")) for argument in sys.argv)
            records = _records_folder(sys.argv[1:]).absolute() if is_elsewhere and not collects else Path(scratch)
            for old in records.glob("[0-9]*.json"):  # of a sweep before, in the same folder
                old.unlink()
            if not any(argument.startswith("hydra.sweep.dir=") for argument in sys.argv):
                sys.argv.append(f"hydra.sweep.dir={hydra_quoted(str(records))}")
        job = _Job(task, tuple(secrets), records, reports_folder)
        app = hydra.main(version_base="1.3", config_path=str(config_folder()), config_name="pretrain")(job.__call__)
        try:
            interrupts = note_interrupts(signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
            if interrupts.numbers:
                raise Stop
            app()
        except KeyboardInterrupt:
            fail("interrupted", status=INTERRUPTED_STATUS)
        except Exception as error:
            if interrupts.numbers:  # OmegaConf turns an interrupt inside it into an error of its own
                fail("interrupted", status=INTERRUPTED_STATUS)
            if "debug=true" in sys.argv:
                traceback.print_exc()
            fail(explain(error), status=CONFIG_ERROR_STATUS)
        if interrupts.numbers and collects:  # lost while the configs were gathered: nothing may be made of them
            fail("interrupted", status=INTERRUPTED_STATUS)
        if any(argument in ("--cfg", "-c", "--info") for argument in sys.argv):
            fail_if_unread()
        is_answer = any(argument in ("--cfg", "-c", "--info", "-i") for argument in sys.argv)
        if records is not None and not is_answer:
            _end_sweep(records, expected=_count_runs(sys.argv[1:]), task_is_collected=collects)
