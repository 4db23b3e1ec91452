"""What a checkpoint costs the training: steps with and without saves, a save's pause, a plain copy of the state.

    python -m tools.bench.save [key=value ...]

Keys are those of `megaasync.pretrain`; the model is a dense one of 5M parameters in two stages or more. The same run is
made without checkpoints and with one every five steps, three times in turn.
"""

import importlib
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from megaasync.config import Config, read, validate
from megaasync.entry.spawn import spawn_ranks

from ..command_line import run_config_tool

STEPS, INTERVAL, ROUNDS = 20, 5, 3
DEFAULTS = {
    "model": {"num_layers": 6, "hidden_size": 256, "num_heads": 8, "num_kv_heads": 8, "ffn_hidden_size": 768},
    "train": {"global_batch_size": 4, "micro_batch_size": 1, "eval_sequences": 1, "eval_interval": None},
}


class _Times:
    """An observer that notes when rows come."""

    def __init__(self) -> None:
        self.at: list[float] = []

    def on_row(self, row: dict[str, Any]) -> None:
        """A row of metrics."""
        if row["kind"] == "train":
            self.at.append(time.perf_counter())


def run_rank(environment: Any, plain: dict[str, Any], folder: Path | None) -> dict[str, float]:
    """One run on one rank: seconds of its steps, of its saves' pauses, of a copy of its state; bytes of the state."""
    build = importlib.import_module("megaasync.train.build")
    groups = importlib.import_module("megaasync.distributed.groups")
    keeper = importlib.import_module("megaasync.checkpoint.writer")
    torch = importlib.import_module("torch")
    prepare = importlib.import_module("megaasync.data.prepare")
    timedelta = importlib.import_module("datetime").timedelta
    config = validate(read(Config, plain))
    device = groups.choose_device(config.device, local_rank=environment.local_rank)
    groups.join_group(environment, device=device, timeout=timedelta(seconds=60))
    times, pauses, copies, sizes = _Times(), [], [], []
    original = keeper.AsyncCheckpointWriter.save

    def timed(self: Any, step: int, entries: Any, *args: Any, **kwargs: Any) -> None:
        self.wait()  # the interval is chosen so that this is none
        start = time.perf_counter()
        original(self, step, entries, *args, **kwargs)
        pauses.append(time.perf_counter() - start)
        sizes.append(keeper.bytes_of(entries))
        memory = torch.ones(sizes[-1], dtype=torch.uint8)  # written once, as the state is
        start = time.perf_counter()
        memory.clone()
        copies.append(time.perf_counter() - start)

    keeper.AsyncCheckpointWriter.save = timed
    files = None if folder is None else build.CheckpointFiles(folder, None, print)
    prepared = prepare.prepare_data(config.data, vocab_size=config.model.vocab_size, notify=lambda line: None)
    trainer = build.build_trainer(
        config, environment=environment, prepared=prepared, device=device, observer=times, files=files
    )
    trainer.train()
    groups.leave_group()
    gaps = [after - before for before, after in zip(times.at[3:], times.at[4:], strict=False)]
    # rows that come right after a segment's start hold the filling of the pipeline too
    inside = [gap for step, gap in enumerate(gaps, start=4) if step % INTERVAL not in (0, 1)]
    return {
        "step": statistics.median(inside) if inside else float("nan"),
        "pause": statistics.median(pauses) if pauses else 0.0,
        "copy": statistics.median(copies) if copies else 0.0,
        "bytes": float(sizes[-1]) if sizes else 0.0,
    }


def bench(plain: dict[str, Any]) -> None:
    """Measure and print; the config's own layout."""
    for group, values in DEFAULTS.items():
        plain[group].update(values)
    plain["model"]["moe"] = None
    plain["train"]["steps"], plain["parallel"]["pipeline"] = STEPS, max(plain["parallel"]["pipeline"], 2)
    ranks = validate(read(Config, plain)).world_size
    found: dict[str, list[dict[str, float]]] = {"without": [], "with": []}
    for number in range(ROUNDS):
        for kind in sorted(found, reverse=number % 2 == 1):
            folder = Path(tempfile.mkdtemp())
            plain["checkpoint"] |= {"interval": INTERVAL if kind == "with" else None, "keep": 1}
            try:
                parts = spawn_ranks(run_rank, (plain, folder if kind == "with" else None), world_size=ranks)
            finally:
                shutil.rmtree(folder, ignore_errors=True)
            found[kind].append(parts[0] | {name: max(part[name] for part in parts) for name in ("pause", "copy")})
            print(
                f"round {number + 1}, {kind} checkpoints: {found[kind][-1]['step'] * 1e3:.1f} ms per step", flush=True
            )
    step = {kind: statistics.median(figures["step"] for figures in rounds) for kind, rounds in found.items()}
    ratios = [figures["step"] / other["step"] for figures, other in zip(found["with"], found["without"], strict=True)]
    pause, copy = (statistics.median(figures[name] for figures in found["with"]) for name in ("pause", "copy"))
    print(
        f"step {step['without'] * 1e3:.1f} ms without, {step['with'] * 1e3:.1f} ms while checkpoints are written "
        f"(median ratio {statistics.median(ratios):.3f})\n"
        f"a save stops a rank for {pause * 1e3:.1f} ms; one copy of its {found['with'][0]['bytes'] / 2**20:.0f} MiB of "
        f"state takes {copy * 1e3:.1f} ms ({pause / copy:.2f} copies)"
    )


def main() -> None:
    """Entry point."""
    run_config_tool(bench, __doc__)


if __name__ == "__main__":
    main()
