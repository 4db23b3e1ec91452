"""Read from Transformer Engine's own source what it takes: the signatures that our adapter is tested against.

    python -m tools.bench.te_signatures [wheel=FILE] [out=tests/support/te_signatures.json]

Without a wheel, pip downloads the pinned one (1 MB, Python sources only, nothing is installed). Nothing of it is run:
classes and functions are found with ast, by following the imports of the modules that name them.
"""

import ast
import json
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megaasync.config import ConfigError

from ..command_line import one_message, read_pairs, wants_help

VERSION = "2.20.2"
NAMES = {  # by module: what the adapter uses, and of classes which methods
    "transformer_engine.pytorch": {
        "Linear": ("__init__", "forward", "backward_dw"),
        "GroupedLinear": ("__init__", "forward", "backward_dw"),
        "RMSNorm": ("__init__",),
        "DotProductAttention": ("__init__", "forward"),
        "Fp8Padding": ("__init__", "forward"),
        "Fp8Unpadding": ("__init__", "forward"),
        "moe_permute": (),
        "moe_unpermute": (),
        "parallel_cross_entropy": (),
        "autocast": ("__init__",),
        "checkpoint": (),
    },
    "transformer_engine.pytorch.router": {"fused_topk_with_score_function": ()},
    "transformer_engine.common.recipe": {
        "Float8CurrentScaling": (),
        "Float8BlockScaling": (),
        "MXFP8BlockScaling": (),
    },
}


@dataclass(frozen=True, slots=True)
class Options:
    """Where to read and write.

    Attributes:
        wheel: file; null downloads it.
        out: file.
    """

    wheel: str | None = None
    out: str = "tests/support/te_signatures.json"


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
    """As Python would write them, self left out and every default as None: `a, b=None, *rest, c=None, **more`."""
    given = function.args
    positional = [*given.posonlyargs, *given.args]
    required = len(positional) - len(given.defaults)
    found = [parameter.arg + ("=None" if number >= required else "") for number, parameter in enumerate(positional)]
    found = [argument for argument in found if argument != "self"]
    if given.vararg or given.kwonlyargs:
        found.append("*" + (given.vararg.arg if given.vararg else ""))
    for parameter, default in zip(given.kwonlyargs, given.kw_defaults, strict=True):
        found.append(parameter.arg + ("" if default is None else "=None"))
    return ", ".join(found + (["**" + given.kwarg.arg] if given.kwarg else []))


def signatures(root: Path) -> dict[str, dict[str, Any]]:
    """By module and name: where it is defined, and what it takes."""
    sources, found = Sources(root), {}
    for module, names in NAMES.items():
        found[module] = {}
        for name, methods in names.items():
            where, node = sources.find(module, name)
            if isinstance(node, ast.FunctionDef):
                takes = {"": parameters_of(node)}
            else:
                takes = {method: parameters_of(sources.method(where, node, method)) for method in methods}
            found[module][name] = {"defined in": where, "takes": takes}
    return found


def read_wheel(wheel: Path | None) -> dict[str, dict[str, Any]]:
    """The signatures of a wheel, by default of the pinned release, which is downloaded.

    Raises:
        ConfigError: it cannot be had.
    """
    with tempfile.TemporaryDirectory() as scratch:
        if wheel is None:
            command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--dest", scratch]
            done = subprocess.run(
                [*command, f"transformer_engine=={VERSION}"], capture_output=True, text=True, check=False
            )
            if done.returncode != 0:
                last = (done.stderr.strip().splitlines() or ["no message"])[-1]
                raise ConfigError(f"transformer_engine=={VERSION}: cannot be downloaded ({last}); give wheel=FILE")
            (wheel,) = Path(scratch).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(Path(scratch) / "unpacked")
        return signatures(Path(scratch) / "unpacked")


def main() -> None:
    """Entry point."""
    if wants_help(Options, __doc__):
        return
    with one_message():
        options = read_pairs(Options, sys.argv[1:], parse=lambda key, value: value)
        found = read_wheel(None if options.wheel is None else Path(options.wheel))
        Path(options.out).write_text(json.dumps({"version": VERSION, "signatures": found}, indent=1) + "\n")
        count = sum(map(len, found.values()))
        print(f"wrote {options.out}: {count} names of transformer_engine {VERSION}")


if __name__ == "__main__":
    main()
