"""Pages of the site that are not in docs/: those of the repository's top, and reference pages made from the code."""

import re
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from omegaconf import OmegaConf

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from megaasync.entry.help import config_folder, render_help  # noqa: E402
from megaasync.schedules import (  # noqa: E402
    SCHEDULES,
    PipelineSchedule,
    ScheduleError,
    build_schedule,
    render_text,
    schedule_metrics,
)
from megaasync.update_rules import OPTIMIZERS  # noqa: E402

TOP = {"README.md": "index.md", "CONTRIBUTING.md": "CONTRIBUTING.md", "CHANGELOG.md": "CHANGELOG.md"}
PUBLIC = (
    "megaasync.schedules", "megaasync.config", "megaasync.update_rules", "megaasync.optim", "megaasync.models",
    "megaasync.nn", "megaasync.kernels", "megaasync.pipeline", "megaasync.plan", "megaasync.data",
    "megaasync.checkpoint", "megaasync.distributed", "megaasync.train", "megaasync.cluster",
)  # fmt: skip
RANKS, MICROBATCHES = 4, 8


def top_page(name: str) -> str:
    """A page of the repository's top, with links as the site has them."""
    text = (ROOT / name).read_text()
    return re.sub(r"\]\((?:docs/)?([\w.]+\.md)", lambda match: f"]({TOP.get(match[1], match[1])}", text)


def config_page() -> str:
    """Every key, as --help has it."""
    return f"# Every key\n\n```text\n{render_help([], name='pretrain')}\n```\n"


def first_defined(name: str, *, num_ranks: int, wanted: tuple[int, ...]) -> PipelineSchedule:
    """The schedule with the first of these numbers of microbatches that it is defined for."""
    for m in wanted:
        with suppress(ScheduleError):
            return build_schedule(name, num_ranks=num_ranks, num_microbatches=m)
    raise AssertionError(f"{name}: not defined for {wanted} microbatches on {num_ranks} ranks")


def schedules_page() -> str:
    """A row for each schedule of the catalog, with figures of its table, and its order."""
    rows, parts = [], []
    for name, kind in SCHEDULES.items():
        table = first_defined(name, num_ranks=RANKS, wanted=(MICROBATCHES, 1))
        metrics = schedule_metrics(table)
        delays = ", ".join(map(str, sorted(set(table.delay), reverse=True)))
        rows.append(
            f"| `{name}` | {table.num_microbatches} | {table.num_stages // RANKS} | {delays} | "
            f"{max(metrics.versions)} | {max(metrics.activations)} | {100 * metrics.bubble:.1f} % |"
        )
        about = re.sub(r"\n +", "\n", (kind.build.__doc__ or "").split("Example:")[0].strip())
        picture = render_text(first_defined(name, num_ranks=2, wanted=(4, 1)), num_steps=2)
        parts.append(f"## {name}\n\n{about}\n\n```text\n{picture}\n```\n")
    head = (
        f"# Schedules\n\nWith P = {RANKS} ranks, a backward as long as two forwards, and communication that is free. "
        "Delays are in updates; weight versions and microbatches are the most that a stage holds. "
        "[The guide](../schedules.md) says which to choose.\n\n"
        "| schedule | m | stages per rank | delays | weight versions | microbatches held | bubble |\n"
        "| --- | --- | --- | --- | --- | --- | --- |\n"
    )
    return head + "\n".join(rows) + "\n\nThe orders on two ranks:\n\n" + "\n".join(parts)


def optimizers_page() -> str:
    """What each optimizer of the catalog is, and its keys."""
    parts = ["# Optimizers\n\nKeys with the values of `hydra_configs/optimizer`.\n"]
    for name, cls in OPTIMIZERS.items():
        with initialize_config_dir(str(config_folder()), version_base="1.3"):
            keys = OmegaConf.to_container(compose("pretrain", [f"optimizer={name}"]), resolve=True)["optimizer"]
        rows = "\n".join(f"| `optimizer.{key}` | `{value}` |" for key, value in keys.items() if key != "name")
        about, _, meanings = (cls.__doc__ or "").partition("Attributes:")
        listed = re.sub(r"\n +(?=[\w, ]+:)", "\n- ", f"\n{meanings.strip()}" if meanings else "")
        parts.append(f"## {name}\n\n{about.strip()}\n\n| key | default |\n| --- | --- |\n{rows}\n{listed}\n")
    return "\n".join(parts)


def api_page(name: str) -> str:
    """The public names of a package, module by module."""
    return f"# {name}\n\n::: {name}\n    options:\n      show_root_heading: false\n      heading_level: 2\n"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are made."""
    made = {site: top_page(name) for name, site in TOP.items()}
    made |= {
        "reference/config.md": config_page(),
        "reference/schedules.md": schedules_page(),
        "reference/optimizers.md": optimizers_page(),
        **{f"reference/{name}.md": api_page(name) for name in PUBLIC},
    }
    for path, text in made.items():
        files.append(File.generated(config, path, content=text))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Links from docs/ to the repository's top."""
    return markdown.replace("](../README.md", "](index.md").replace("](../", "](")
