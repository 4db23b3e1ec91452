"""The documentation builds as a site without a warning: no dead link, no page left out, no stale docstring."""

import subprocess
import sys

from megaasync.schedules import SCHEDULES
from megaasync.update_rules import OPTIMIZERS
from tests.support.cli import REPOSITORY


def test_the_site_builds_without_a_warning(tmp_path):
    command = [sys.executable, "-m", "mkdocs", "build", "-f", "scripts/site/mkdocs.yml", "-d", str(tmp_path / "site")]
    ran = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr  # in strict mode a warning is an error
    site = tmp_path / "site"
    for page in (REPOSITORY / "docs").glob("*.md"):
        assert (site / f"{page.stem}.html").exists(), page
    schedules, optimizers = ((site / f"reference/{name}.html").read_text() for name in ("schedules", "optimizers"))
    assert all(f'id="{name}"' in schedules for name in SCHEDULES)
    assert all(f'id="{name}"' in optimizers for name in OPTIMIZERS)
    packages = {path.parent.name for path in (REPOSITORY / "megaasync").glob("*/__init__.py")}
    documented = {path.stem.removeprefix("megaasync.") for path in (site / "reference").glob("megaasync.*.html")}
    assert packages - documented == {"entry", "fields", "observe"}, "add a new package to scripts/site"
