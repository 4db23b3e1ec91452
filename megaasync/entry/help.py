"""--help and --version: every key with its value now and what it means, read off the schema's own docstrings."""

import re
import sys
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass
from functools import cache
from inspect import getdoc
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

import megaasync
from megaasync.config import Config, read
from megaasync.entry.console import fail_if_unread

_WIDTH = 118
# keys that mean the same wherever they stand
_USUAL = {
    "lr": "peak learning rate.",
    "weight_decay": "decoupled weight decay, times the learning rate; norms get none.",
    "momentum": "of the moving average of gradients; 0 for none.",
    "betas": "decay of the moments.",
    "beta2": "decay of the second moment.",
    "eps": "added to the root of the second moment.",
    "momentum_decay": "how fast the momentum grows to beta1, as torch's.",
    "newton_schulz_steps": "iterations of the orthogonalisation.",
    "newton_schulz_precision": "of the orthogonalisation's products; auto is bfloat16 on GPUs.",
    "project": "as Weights & Biases has it.",
    "run_name": "as Weights & Biases has it; null takes the folder's name.",
    "mode": "disabled, offline or online.",
    "device": "auto takes a GPU if there is one.",
    "debug": "true shows tracebacks.",
    "dry_run": "resolve, validate, print the plan and exit.",
    "tensor": "ranks that share every layer.",
    "pipeline": "ranks that share the layers' sequence, in stages.",
    "mounts": "of the container, as host:container.",
}


def config_folder() -> Path:
    """The Hydra configs: beside the package in a checkout, inside it when installed."""
    package = Path(__file__).resolve().parent.parent
    inside = package / "hydra_configs"
    return inside if inside.is_dir() else package.parent / "hydra_configs"


def groups() -> dict[str, list[str]]:
    """Groups of configs and their choices."""
    return {
        folder.name: sorted(file.stem for file in folder.glob("*.yaml") if not file.stem.startswith("_"))
        for folder in sorted(config_folder().iterdir())
        if folder.is_dir() and any(folder.glob("*.yaml"))
    }


@cache
def meanings(cls: type) -> dict[str, str]:
    """What the docstring of a dataclass says of its fields, by name."""
    _, found, text = (getdoc(cls) or "").partition("Attributes:")
    if not found:
        return {}
    lines = re.sub(r"\n\s{2,}", " ", textwrap.dedent(text.split("\n\n")[0] if "\n\n" in text.strip() else text))
    said: dict[str, str] = {}
    for line in lines.splitlines():
        match = re.match(r"\s*([\w, ]+?):\s+(.*)", line)
        if match:
            said |= {name.strip(): match.group(2) for name in match.group(1).split(",")}
    return said


def _lines(config: Any, prefix: str = "") -> Iterator[tuple[str, str, str]]:
    """(key, value, meaning) of every key that can be set."""
    said = meanings(type(config))
    for field in fields(config):
        value = getattr(config, field.name)
        if is_dataclass(value):
            yield from _lines(value, f"{prefix}{field.name}.")
        elif field.name != "name":
            shown = "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
            yield f"{prefix}{field.name}", shown, said.get(field.name) or _USUAL.get(field.name, "")


def render_help(arguments: Sequence[str], *, name: str) -> str:
    """The help page.

    Args:
        arguments: overrides of the command line: their values are shown.
        name: of the command.
    """
    overrides = [argument for argument in arguments if "=" in argument and not argument.startswith(("-", "hydra"))]
    if name == "launch" and not any(override.startswith("cluster=") for override in overrides):
        overrides.insert(0, "cluster=slurm")
    with initialize_config_dir(str(config_folder()), version_base="1.3"):
        plain = OmegaConf.to_container(compose("pretrain", overrides), resolve=True)
    rows = list(_lines(read(Config, plain)))
    wide = max(len(key) for key, _, _ in rows)
    does = {
        "pretrain": "one training run, or several with -m",
        "launch": "write and submit the whole cluster job of a run, or an array of them with -m",
    }
    lines = [
        f"python -m megaasync.{name}: {does.get(name, '')}",
        "",
        f"usage: python -m megaasync.{name} [group=choice] [key=value] [-m] [--config-dir DIR] [--cfg job] [--version]",
        "",
        "Groups (group=choice):",
        *(f"  {group}: {', '.join(choices)}" for group, choices in groups().items()),
        "",
        "Keys (key=value), their values with these choices, and what they mean:",
    ]
    for key, value, meaning in rows:
        head = f"  {key:{wide}}  {value if len(value) <= 24 else value[:21] + '...':24}"
        lines += textwrap.wrap(f"{head}  {meaning}", _WIDTH, subsequent_indent=" " * (wide + 30), drop_whitespace=True)
    lines += [
        "",
        "Examples:",
        *(
            [
                "  python -m megaasync.pretrain parallel.pipeline=2 train.steps=50",
                "  python -m megaasync.pretrain schedule=2bw correction=error_feedback optimizer.lr=0.003",
                "  python -m megaasync.pretrain -m optimizer=muon,adamw hydra/launcher=joblib",
                "  python -m megaasync.pretrain dry_run=true experiment=paper_10b_moe cluster=slurm cluster.nodes=8",
            ]
            if name != "launch"
            else [
                "  python -m megaasync.launch experiment=paper_10b_moe cluster=slurm cluster.nodes=8 data.path=/tokens",
                "  python -m megaasync.launch -m optimizer.lr=0.001,0.002 cluster=slurm cluster.submit=false",
            ]
        ),
    ]
    return "\n".join(lines)


def answer_questions(arguments: Sequence[str], *, name: str) -> None:
    """Answer --help and --version.

    Raises:
        SystemExit: 0, if one of them was asked for.
    """
    if "--version" in arguments:
        print(f"megaasync {megaasync.__version__}")
        fail_if_unread()
        sys.exit(0)
    if any(argument in ("--help", "-h") for argument in arguments):
        print(render_help(arguments, name=name))
        fail_if_unread()
        sys.exit(0)
