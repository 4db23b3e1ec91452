"""Checkpoints for humans: python -m megaasync.checkpoint list|verify|describe FOLDER."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from megaasync.checkpoint.paths import MARK, Found, checkpoints_in, inspect_checkpoint, read_meta, wrong_files
from megaasync.config import ConfigError


def _bytes(path: Path) -> int:
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


def _mib(number: int) -> str:
    return f"{number / 2**20:,.1f} MiB"


def _found_in(folder: Path) -> list[Found]:
    """A checkpoint itself, or those of a run folder or of a folder of checkpoints.

    Raises:
        ConfigError: there are none.
    """
    if not folder.is_dir():
        raise ConfigError(f"{folder}: no such folder")
    if (folder / MARK).exists() or folder.name.startswith("step_"):
        return [inspect_checkpoint(folder)]
    found = checkpoints_in(folder) or checkpoints_in(folder / "checkpoints")
    if not found:
        raise ConfigError(f"{folder}: no checkpoints in it; give a run folder, its checkpoints/ or one step_... of it")
    return found


def list_checkpoints(folder: Path) -> int:
    """One line per checkpoint; the status is 0."""
    print(f"{'step':>9}  {'size':>12}  {'whole':5}  made")
    for found in _found_in(folder):
        if found.is_complete:
            meta = read_meta(found.path)
            layout = " ".join(f"{axis} {size}" for axis, size in meta["layout"].items() if size > 1) or "one rank"
            made = f"{meta['created']}  {meta['schedule']}, {layout}"
        else:
            made = found.problem
        whole = "yes" if found.is_complete else "no"
        print(f"{found.step:>9}  {_mib(_bytes(found.path)):>12}  {whole:5}  {made}")
    return 0


def verify(folder: Path) -> int:
    """Read every file and compare checksums; the status is 1 if a checkpoint is not whole."""
    broken = 0
    for found in _found_in(folder):
        problems = list(wrong_files(found.path))
        broken += bool(problems)
        print(f"{found.path}: {'; '.join(problems) if problems else 'whole, every checksum is right'}")
    return int(broken > 0)


def describe(folder: Path) -> int:
    """What one checkpoint is of; the newest one of several."""
    whole = [found for found in _found_in(folder) if found.is_complete]
    if not whole:
        raise ConfigError(f"{folder}: no whole checkpoint; python -m megaasync.checkpoint list {folder} says why")
    path = max(whole, key=lambda found: found.step).path
    meta = read_meta(path)
    config = meta["config"]
    loss = "none" if meta["train_loss"] is None else f"{meta['train_loss']:.4f}"
    behind = meta["pending_of_stage"]
    rows = {
        "folder": path,
        "size": _mib(_bytes(path)),
        "made": f"{meta['created']}, torch {meta['torch']}",
        "steps": f"{meta['step']} of {config['train']['steps']}, {meta['tokens']:,} tokens, training loss {loss}",
        "model": f"{config['model']['name']}: {config['model']['num_layers']} layers, hidden "
        f"{config['model']['hidden_size']}, vocabulary {config['model']['vocab_size']}, {config['train']['dtype']}",
        "optimizer": f"{config['optimizer']['name']}, lr {config['optimizer']['lr']:g}",
        "schedule": f"{meta['schedule']}, correction {config['correction']['name']}",
        "pending": f"{max(behind)} gradient(s); updates that each stage is behind: {behind}",
        "layout": ", ".join(f"{axis} {size}" for axis, size in meta["layout"].items()),
        "goes on with": f"python -m megaasync.pretrain ... checkpoint.resume={path}",
    }
    for name, value in rows.items():
        print(f"{name:13} {value}")
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m megaasync.checkpoint", description=__doc__)
    parser.add_argument("what", choices=["list", "verify", "describe"])
    parser.add_argument("folder", type=Path, help="a run folder, its checkpoints/ folder, or one step_... folder")
    given = parser.parse_args(arguments)
    try:
        return {"list": list_checkpoints, "verify": verify, "describe": describe}[given.what](given.folder)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        sys.stdout = None
        return 1
    except OSError as error:
        print(f"error: {error.filename or given.folder}: {error.strerror}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
