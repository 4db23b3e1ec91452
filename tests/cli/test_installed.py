"""What pip installs: one package with configs and tools in it, and programs that run from anywhere."""

import ast
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from megaasync.__main__ import COMMANDS
from megaasync.cluster.record import code_hash
from tests.support.cli import REPOSITORY, TINY, environment, pretrain, summary
from tests.support.tiers import slow_params

SHIMS = sorted(
    path.name for path in (REPOSITORY / "tools").glob("*.py") if path.stem not in ("__init__", "command_line")
)


@pytest.fixture(scope="module")
def wheel_site(tmp_path_factory):
    """The project built as a wheel and installed into an empty folder."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    ignore = lambda where, names: [n for n in names if n.startswith(".") or n in ("runs", "build", "tests")]  # noqa: E731
    shutil.copytree(REPOSITORY, source, ignore=ignore)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
    subprocess.run([*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", str(folder), str(source)], check=True)
    (wheel,) = folder.glob("*.whl")
    subprocess.run([*pip, "install", "--no-deps", "--target", str(folder / "site"), str(wheel)], check=True)
    shutil.rmtree(source)
    return folder / "site"


def test_an_installed_wheel_trains_from_an_empty_folder(wheel_site, tmp_path):
    where = subprocess.run(
        [sys.executable, "-c", "import megaasync; print(megaasync.__file__)"],
        env={**environment(), "PYTHONPATH": str(wheel_site)}, cwd=tmp_path, capture_output=True, text=True,
    )  # fmt: skip
    assert where.stdout.startswith(str(wheel_site))
    ran = pretrain(*TINY, "train.steps=2", "run.dir=run", cwd=tmp_path, PYTHONPATH=str(wheel_site))
    assert ran.status == 0, ran.err
    assert summary(tmp_path / "run")["status"] == "completed"


def test_the_wheel_has_the_package_and_nothing_beside_it(wheel_site):
    """No top-level `tools` that would hide somebody else's; a node with a checkout has the same code hash."""
    assert {path.name for path in wheel_site.iterdir() if not path.name.endswith(".dist-info")} == {"megaasync", "bin"}
    (info,) = wheel_site.glob("*.dist-info")
    metadata = (info / "METADATA").read_text()
    assert "Project-URL: Paper, https://arxiv.org/abs/2606.30634" in metadata
    package = wheel_site / "megaasync"
    assert (package / "py.typed").exists() and (
        package / "tools" / "study" / "configs" / "study" / "full.yaml"
    ).exists()
    assert not [name for name in SHIMS if (package / "tools" / name).exists()]
    assert code_hash(package) == code_hash(REPOSITORY / "megaasync")


@pytest.mark.parametrize("name", slow_params(list(COMMANDS), kept=range(0, len(COMMANDS), 3), area="out"))
def test_every_command_of_the_wheel_explains_itself(wheel_site, tmp_path, name):
    ran = subprocess.run(
        [sys.executable, "-m", "megaasync", *name.split(), "--help"],
        env={**environment(), "PYTHONPATH": str(wheel_site)}, cwd=tmp_path, capture_output=True, text=True,
    )  # fmt: skip
    assert ran.returncode == 0 and len(ran.stdout.splitlines()) > 3, ran.stderr


def test_a_checkout_runs_its_own_tools_and_a_wheel_its_own(wheel_site, tmp_path):
    """Even if the other one is installed."""
    code = (
        "import importlib; from megaasync.__main__ import COMMANDS, _module_of\n"
        "print(importlib.import_module(_module_of(COMMANDS['bench draw'])).__file__)"
    )
    for root, expected in ((wheel_site, wheel_site / "megaasync/tools"), (REPOSITORY, REPOSITORY / "tools")):
        ran = subprocess.run(
            [sys.executable, "-c", code],
            env=environment(PYTHONPATH=str(root)), cwd=tmp_path, capture_output=True, text=True,
        )  # fmt: skip
        assert Path(ran.stdout.strip()).parent == expected / "bench", ran.stderr


@pytest.mark.parametrize("words", [["bench"], ["bench", "nope"]])
def test_half_a_command_names_the_others(tmp_path, words):
    ran = subprocess.run([sys.executable, "-m", "megaasync", *words], cwd=tmp_path, capture_output=True, text=True)
    assert ran.returncode == 2 and "give one of bench pipeline, " in ran.stderr


def test_scripts_of_tools_hide_no_library(tmp_path):
    """Files with a library's name beside a script, or in its package, are not what libraries import."""
    shutil.copytree(REPOSITORY / "tools", tmp_path / "tools")
    for name in ("inspect", "evaluate", "datasets", "data/inspect", "bench/statistics", "study/csv"):
        (tmp_path / "tools" / f"{name}.py").write_text("raise SystemExit('a library was hidden')\n")
    assert len(SHIMS) >= 6
    for name in SHIMS:
        ran = subprocess.run(
            [sys.executable, str(tmp_path / "tools" / name), "--help"],
            env=environment(PYTHONPATH=str(REPOSITORY)), cwd=tmp_path / "tools", capture_output=True, text=True,
        )  # fmt: skip
        assert ran.returncode == 0, (name, ran.stderr)
        statements = ast.parse((REPOSITORY / "tools" / name).read_text()).body[1:]  # after the docstring
        assert len(statements) <= 6, "a script only starts a module"
