"""What the pages say is what the code does."""

import re
from pathlib import Path

import pytest

from megaasync.schedules import build_schedule, render_text

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("name", ["1f1b", "2bw"])
def test_the_readmes_picture_is_the_schedule(name):
    readme = (ROOT / "README.md").read_text()
    drawn = readme.split(f"\n{name}\n")[1].splitlines()[:3]
    rendered = render_text(build_schedule(name, num_ranks=3, num_microbatches=3), num_steps=3).splitlines()
    for line, whole in zip(drawn, rendered, strict=True):
        assert len(line) > 100 and whole.startswith(line)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_every_file_and_link_named_in_a_page_exists(page):
    text = page.read_text()
    links = [link for link in re.findall(r"\]\(([^)#:]+)\)", text)]
    named = re.findall(r"`((?:megaasync|scripts|tools|tests|hydra_configs|docs)/[\w/.]+)`", text)
    for link in links:
        assert (page.parent / link).exists(), link
    for name in named:
        assert (ROOT / name).exists() or "NAME" in name, name


SOURCES = [path for folder in ("megaasync", "tools", "tests") for path in sorted((ROOT / folder).rglob("*.py"))]
OURS = re.compile(
    r"(?<![\w./-])((?:docs|megaasync|tools|tests|scripts|hydra_configs)/[\w/.-]+\.(?:md|py|yaml|sh|json))"
)
PAGE = re.compile(r"(?<![\w./-])([A-Z]{3,}\.md)\b")


def test_every_page_and_file_named_in_the_code_exists():
    """In docstrings, comments and messages; a page with a bare name lies at the top or in docs/."""
    missing = []
    for path in SOURCES:
        text = path.read_text()
        missing += [(path, name) for name in OURS.findall(text) if not (ROOT / name).exists()]
        for name in PAGE.findall(text):
            if not (ROOT / name).exists() and not (ROOT / "docs" / name).exists():
                missing.append((path, name))
    assert missing == []


def test_every_group_choice_is_in_the_running_page():
    page = (ROOT / "docs" / "running.md").read_text()
    for group in (ROOT / "hydra_configs").iterdir():
        if group.is_dir() and group.name not in ("schedule", "optimizer"):  # a catalog each, listed by --help
            row = next(line for line in page.splitlines() if line.startswith(f"| `{group.name}` |"))
            for choice in group.glob("[!_]*.yaml"):
                assert f"`{choice.stem}`" in row, f"{group.name}={choice.stem}"
