"""Read from Transformer Engine's own source what it takes, and say whether our adapter can use that release.

    python -m tools.bench.te_signatures [release=2.20.2] [wheel=FILE] [installed=true] [out=FILE]

By default pip downloads the release's wheel (1 MB, Python sources only, nothing is installed); `installed=true` reads
the sources that this Python would import, as the build of an image does. Nothing of them is run: classes and functions
are found with ast, by following the imports of the modules that name them. `out` gets the signatures as JSON, which is
what the tests read (tests/support/te_signatures). The status is 1 if the release cannot be used.
"""

import ast
import importlib.util
import inspect
import json
import subprocess
import sys
import tempfile
import zipfile
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from megaasync.config import ConfigError
from megaasync.kernels.te_contract import NEEDED, features_of

from ..command_line import one_message, read_pairs, wants_help

RELEASES = ("2.14.0", "2.19.0", "2.20.2")  # that the tests read


@dataclass(frozen=True, slots=True)
class Options:
    """Where to read and write.

    Attributes:
        release: to download.
        wheel: file to read instead.
        installed: read what is installed instead.
        out: file for the signatures; null writes none.
    """

    release: str = RELEASES[-1]
    wheel: str | None = None
    installed: bool = False
    out: str | None = None


class Sources:
    """Modules of an unpacked wheel."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._trees: dict[str, ast.Module] = {}

    def _file(self, module: str) -> Path:
        path = self._root.joinpath(*module.split("."))
        return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")

    def tree(self, module: str) -> ast.Module:
        """Parsed."""
        if module not in self._trees:
            self._trees[module] = ast.parse(self._file(module).read_text())
        return self._trees[module]

    def find(self, module: str, name: str) -> tuple[str, ast.ClassDef | ast.FunctionDef]:
        """Where a name that a module offers is defined, imports followed.

        Raises:
            ConfigError: nowhere.
        """
        for node in ast.walk(self.tree(module)):
            if (
                isinstance(node, ast.ClassDef | ast.FunctionDef)
                and node.name == name
                and node in self.tree(module).body
            ):
                return module, node
        for node in self.tree(module).body:
            if isinstance(node, ast.ImportFrom) and any(name in (alias.asname, alias.name) for alias in node.names):
                package = module if self._file(module).name == "__init__.py" else module.rpartition(".")[0]
                base = ".".join(package.split(".")[: len(package.split(".")) + 1 - node.level]) if node.level else ""
                target = ".".join(part for part in (base, node.module) if part)
                original = next(alias.name for alias in node.names if name in (alias.asname, alias.name))
                return self.find(target, original)
        raise ConfigError(f"{module}: has no {name}")

    def method(self, module: str, owner: ast.ClassDef, name: str) -> ast.FunctionDef:
        """Of a class or of the first base that has it.

        Raises:
            ConfigError: none has.
        """
        for node in owner.body:
            if isinstance(node, ast.FunctionDef) and node.name == name:
                return node
        for base in owner.bases:
            if isinstance(base, ast.Name):
                where, found = self.find(module, base.id)
                return self.method(where, found, name)
        raise ConfigError(f"{module}.{owner.name}: has no {name}")


def parameters_of(function: ast.FunctionDef) -> str:
    """As Python would write them, self left out and every default as None: `a: int, b: str = None, *rest, **more`."""
    given = function.args
    positional = [*given.posonlyargs, *given.args]
    required = len(positional) - len(given.defaults)
    found = [_written(parameter, number >= required) for number, parameter in enumerate(positional)]
    found = [argument for argument in found if argument != "self"]
    if given.vararg or given.kwonlyargs:
        found.append("*" + (given.vararg.arg if given.vararg else ""))
    for parameter, default in zip(given.kwonlyargs, given.kw_defaults, strict=True):
        found.append(_written(parameter, default is not None))
    return ", ".join(found + (["**" + given.kwarg.arg] if given.kwarg else []))


def _written(parameter: ast.arg, has_default: bool) -> str:
    annotation = "" if parameter.annotation is None else f": {ast.unparse(parameter.annotation)}"
    return parameter.arg + annotation + (" = None" if has_default else "")


def signatures(root: Path) -> dict[str, str]:
    """What each name that the adapter uses takes, by "module name method"; names that are not there are left out."""
    sources, found = Sources(root), {}
    for module, name, method in NEEDED:
        with suppress(ConfigError, FileNotFoundError):
            where, node = sources.find(module, name)
            function = node if isinstance(node, ast.FunctionDef) else sources.method(where, node, method or "__init__")
            found[" ".join((module, name, method)).strip()] = parameters_of(function)
    return found


def signature_of(written: dict[str, str], module: str, name: str, method: str) -> inspect.Signature:
    """One of `signatures`, as Python has it.

    Raises:
        KeyError: the release has no such name.
    """
    scope: dict[str, Any] = {}
    takes = written[" ".join((module, name, method)).strip()]
    exec(f"from __future__ import annotations\ndef function({takes}): pass", scope)
    return inspect.signature(scope["function"])


def read_wheel(wheel: Path | None, *, release: str) -> dict[str, str]:
    """The signatures of a wheel, by default of a release, which is downloaded.

    Raises:
        ConfigError: it cannot be had.
    """
    with tempfile.TemporaryDirectory() as scratch:
        if wheel is None:
            command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--dest", scratch]
            done = subprocess.run(
                [*command, f"transformer_engine=={release}"], capture_output=True, text=True, check=False
            )
            if done.returncode != 0:
                last = (done.stderr.strip().splitlines() or ["no message"])[-1]
                raise ConfigError(f"transformer_engine=={release}: cannot be downloaded ({last}); give wheel=FILE")
            (wheel,) = Path(scratch).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(Path(scratch) / "unpacked")
        return signatures(Path(scratch) / "unpacked")


def installed_root() -> Path:
    """The folder that holds the package which this Python would import.

    Raises:
        ConfigError: there is none.
    """
    spec = importlib.util.find_spec("transformer_engine")
    if spec is None or spec.origin is None:
        raise ConfigError("installed=true: Transformer Engine is not installed; install it, or give release=")
    return Path(spec.origin).parents[1]


def main() -> None:
    """Entry point."""
    if wants_help(Options, __doc__):
        return
    with one_message():
        options = read_pairs(Options, sys.argv[1:], parse=_parse)
        wheel = None if options.wheel is None else Path(options.wheel)
        found = signatures(installed_root()) if options.installed else read_wheel(wheel, release=options.release)
        if options.out is not None:
            Path(options.out).write_text(json.dumps(found, indent=1) + "\n")
        what = "the installed release" if options.installed else options.wheel or f"release {options.release}"
        try:
            features = features_of(partial(signature_of, found))
        except ImportError as error:
            print(f"Transformer Engine, {what}: cannot be used: {error}")
            sys.exit(1)
        print(f"Transformer Engine, {what}: can be used; {features}")


def _parse(key: str, value: str) -> str | bool:
    if key != "installed":
        return value
    if value not in ("true", "false"):
        raise ConfigError(f"installed={value}: true or false")
    return value == "true"


if __name__ == "__main__":
    main()
