"""The configs of `hydra_configs` without Hydra or a YAML library: for machines that have torch and little else.

The files are nested mappings of scalars and one-line lists, which is all that is read here; tests compare it with YAML.
"""

import json
import re
from pathlib import Path
from typing import Any

_CONFIGS = Path(__file__).parents[2] / "hydra_configs"
_NUMBER = re.compile(r"[-+]?(\d+(\.\d*)?|\.\d+)([eE][-+]?\d+)?")


def _scalar(text: str) -> Any:
    named = {"null": None, "true": True, "false": False, "": None}
    if text in named:
        return named[text]
    if text.startswith("["):
        return [_scalar(part.strip()) for part in text[1:-1].split(",") if part.strip()]
    if text == "{}":
        return {}
    if _NUMBER.fullmatch(text):
        return float(text) if any(c in text for c in ".eE") else int(text)
    return json.loads(text) if text.startswith('"') else text


def read_simple(path: Path) -> dict[str, Any]:
    """A file of nested mappings; lines of a block under `hydra:` and the `defaults:` list are left out."""
    root: dict[str, Any] = {}
    open_at: list[tuple[int, dict[str, Any]]] = [(-1, root)]
    skipped: int | None = None
    for raw in path.read_text().splitlines():
        line = re.sub(r"\s+#.*$", "", raw).rstrip()
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        indent = len(line) - len(line.lstrip())
        if skipped is not None and indent > skipped:
            continue
        skipped = None
        key, _, value = line.strip().partition(":")
        if indent == 0 and key in ("defaults", "hydra"):
            skipped = 0
            continue
        while open_at[-1][0] >= indent:
            open_at.pop()
        inner = open_at[-1][1]
        if value.strip():
            inner[key] = _scalar(value.strip())
        else:
            inner[key] = {}
            open_at.append((indent, inner[key]))
    return root


def _with_defaults(path: Path) -> dict[str, Any]:
    """A file of a group on top of the one that its `defaults: [_name]` names."""
    own = read_simple(path)
    match = re.search(r"^defaults: \[(\w+)\]$", path.read_text(), re.MULTILINE)
    return own if match is None else _merged(_with_defaults(path.with_name(f"{match.group(1)}.yaml")), own)


def _merged(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    merged = dict(below)
    for key, value in above.items():
        both = isinstance(value, dict) and isinstance(below.get(key), dict)
        merged[key] = _merged(below[key], value) if both else value
    return merged


def compose(groups: dict[str, str], overrides: dict[str, Any]) -> dict[str, Any]:
    """The main config with its groups, or those that are given, and then single values, keys as `train.steps`."""
    main = _CONFIGS / "pretrain.yaml"
    plain, defaults = read_simple(main), dict(re.findall(r"^  - (\w+): (\w+)$", main.read_text(), re.MULTILINE))
    del defaults["experiment"]
    for group, choice in (defaults | groups).items():
        plain[group] = _with_defaults(_CONFIGS / group / f"{choice}.yaml")
    for key, value in overrides.items():
        *above, last = key.split(".")
        inner = plain
        for group in above:
            inner = inner[group]
        inner[last] = value
    return plain
