"""Rules of the code, read with ast: imports go down only, no global state, torch stays out of the light packages."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "megaasync"

LAYER = {
    "fields": 0,
    "schedules": 0,
    "update_rules": 1,
    "config": 2,
    "cluster": 3,
    "distributed": 3,
    "kernels": 3,
    "data": 4,
    "nn": 4,
    "observe": 4,
    "optim": 4,
    "models": 5,
    "pipeline": 6,
    "checkpoint": 7,
    "plan": 7,
    "train": 8,
    "entry": 9,
    "pretrain": 10,
    "launch": 11,
    "__main__": 12,
}


def package_of(path: Path) -> str | None:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return None if parts == ("__init__",) else parts[0]


def submodule_or_package(package: str, name: str) -> str:
    """What `from package import name` reads: a module of that name, or the package for one of its names."""
    inside = PACKAGE.parent.joinpath(*package.split("."), name)
    return f"{package}.{name}" if inside.is_dir() or inside.with_suffix(".py").exists() else package


def imported_modules(path: Path) -> list[tuple[int, str]]:
    """(line, dotted module) of every import anywhere in a file, strings given to import_module included."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            found += [(node.lineno, submodule_or_package(node.module, alias.name)) for alias in node.names]
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "import_module":
            found += [(node.lineno, a.value) for a in node.args if isinstance(a, ast.Constant)]
    return found


def sources() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def violations(path: Path) -> list[str]:
    package, wrong = package_of(path), []
    for line, module in imported_modules(path):
        parts = module.split(".")
        if parts[0] != "megaasync" or len(parts) == 1 or package is None:
            continue
        other = parts[1]
        if other != package and LAYER[other] >= LAYER[package]:
            wrong.append(f"{path}:{line}: {package} (layer {LAYER[package]}) imports {other} (layer {LAYER[other]})")
    return wrong


def test_every_package_has_a_layer():
    packages = {package_of(path) for path in sources()} - {None}
    assert packages == set(LAYER)


def test_imports_go_down_only():
    assert [v for path in sources() for v in violations(path)] == []


def test_the_rule_notices_an_upward_import(tmp_path, monkeypatch):
    (tmp_path / "nn").mkdir()
    bad = tmp_path / "nn" / "bad.py"
    bad.write_text("def f():\n    from megaasync.train.build import build_trainer\n")
    monkeypatch.setattr(sys.modules[__name__], "PACKAGE", tmp_path)
    assert len(violations(bad)) == 1


def test_no_import_cycles():
    graph = {}
    for path in sources():
        name = ".".join(["megaasync", *path.relative_to(PACKAGE).with_suffix("").parts]).removesuffix(".__init__")
        graph[name] = {m for _, m in imported_modules(path) if m.startswith("megaasync.")} - {name}

    done = set()

    def visit(name, path):
        assert name not in path, " -> ".join([*path, name])
        if name not in done:
            for other in graph.get(name, ()):
                visit(other, (*path, name))
            done.add(name)

    for name in graph:
        if name != "megaasync":  # the package's public names are lazy
            visit(name, ())


MUTABLE = (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp)
MUTABLE_CALLS = {"list", "dict", "set", "deque", "defaultdict", "Counter", "OrderedDict"}


def is_table(target: str) -> bool:
    """Constants in capitals are tables that nobody writes to; `__all__` is Python's own."""
    return target.strip("_").isupper() or target == "__all__"


def globals_in(path: Path) -> list[str]:
    tree, wrong = ast.parse(path.read_text()), []
    for node in ast.walk(tree):
        if isinstance(node, ast.Global):
            wrong.append(f"{path}:{node.lineno}: global {', '.join(node.names)}")
    for node in tree.body:
        value = getattr(node, "value", None)
        mutable = isinstance(value, MUTABLE) or (
            isinstance(value, ast.Call) and getattr(value.func, "id", "") in MUTABLE_CALLS
        )
        if isinstance(node, ast.Assign | ast.AnnAssign) and mutable:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            wrong += [f"{path}:{node.lineno}: {t.id}" for t in targets if not is_table(t.id)]
    return wrong


def written_tables(path: Path) -> list[str]:
    """Writes to a module-level table from inside a function."""
    tree = ast.parse(path.read_text())
    tables = {
        target.id
        for node in tree.body
        if isinstance(node, ast.Assign | ast.AnnAssign)
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        if isinstance(target, ast.Name)
    }
    wrong = []
    for node in ast.walk(tree):
        if (isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store | ast.Del)) or (
            isinstance(node, ast.Attribute) and node.attr in ("append", "update", "add", "setdefault", "pop", "clear")
        ):
            name = getattr(node.value, "id", None)
        else:
            continue
        if name in tables:
            wrong.append(f"{path}:{node.lineno}: {name} is written to")
    return wrong


def test_no_globals():
    assert [v for path in sources() for v in (*globals_in(path), *written_tables(path))] == []


def test_the_rule_notices_globals(tmp_path):
    bad = tmp_path / "bad.py"
    bad.write_text("cache = {}\nTABLE = {}\ndef f():\n    global x\n    TABLE[1] = 2\n    TABLE.update(a=1)\n")
    assert len(globals_in(bad)) == 2
    assert len(written_tables(bad)) == 2


def test_public_names_are_there():
    import megaasync

    for name in megaasync.__all__:
        assert getattr(megaasync, name) is not None
    with pytest.raises(AttributeError):
        megaasync.nonsense  # noqa: B018


LIGHT = [
    "megaasync",
    "megaasync.config",
    "megaasync.schedules",
    "megaasync.update_rules",
    "megaasync.entry.hydra_app",
    "megaasync.entry.spawn",
    "megaasync.data.prepare",
    "megaasync.pretrain",
]


@pytest.mark.parametrize("module", LIGHT)
def test_light_modules_import_no_torch(module):
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.parametrize("package", ["fields", "config", "schedules"])
def test_the_lowest_layers_are_standard_library_only(package):
    allowed = {*sys.stdlib_module_names, "megaasync"}
    for path in (PACKAGE / package).rglob("*.py"):
        for line, module in imported_modules(path):
            assert module.split(".")[0] in allowed, f"{path}:{line}: {module}"


def test_environment_variables_are_read_in_one_place():
    readers = {
        str(path.relative_to(PACKAGE))
        for path in sources()
        if any(
            isinstance(n, ast.Attribute) and n.attr in ("environ", "getenv")
            for n in ast.walk(ast.parse(path.read_text()))
        )
    }
    # hydra_app only sets a variable of Hydra's own
    assert readers == {"distributed/environment.py", "entry/hydra_app.py"}, readers
