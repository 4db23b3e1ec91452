"""Taking a run folder back to what it was after a step, before the run goes on from there. Needs no torch."""

import json
from pathlib import Path

from megaasync.checkpoint.paths import remove_leftovers, set_aside_newer
from megaasync.observe.run_files import iterate_metrics, write_lines


def rollback_to(folder: Path, step: int) -> None:
    """Make a run folder what it was after a step; newer checkpoints are renamed, not deleted."""
    root = folder / "checkpoints"
    remove_leftovers(root)
    set_aside_newer(root, step)
    rows = iterate_metrics(folder / "metrics.jsonl")
    kept = (row for row in rows if row.get("kind") == "start" or row.get("step", 0) <= step)
    write_lines(folder / "metrics.jsonl", (json.dumps(row) + "\n" for row in kept))
    for name in ("summary.json", "report.html", "trace.json"):
        (folder / name).unlink(missing_ok=True)
