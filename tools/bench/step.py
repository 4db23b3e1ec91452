"""What the framework costs on one rank: our step against a plain torch loop of the same model, in time and memory.

    python -m tools.bench.step [key=value ...]

Keys are those of `megaasync.pretrain`; the model is a dense one of 8M parameters under AdamW on the CPU, one thread.
Each side runs in a process of its own, in turn; both start from the same weights and see the same batches, and their
losses must agree. Memory is the most that a process held above what it held before the model was made.
"""

import importlib
import resource
import statistics
import time
from typing import Any

from megaasync.config import Config, read, validate
from megaasync.entry.hydra_app import fail
from megaasync.entry.spawn import spawn_ranks

from ..command_line import run_config_tool

STEPS, ROUNDS, WARM = 12, 5, 2
DEFAULTS = {
    "model": {
        "num_layers": 6,
        "hidden_size": 256,
        "num_heads": 8,
        "num_kv_heads": 4,
        "ffn_hidden_size": 768,
        "vocab_size": 4096,
        "seq_length": 256,
        "tie_embeddings": False,
        "moe": None,
    },
    "train": {
        "global_batch_size": 8,
        "micro_batch_size": 2,
        "eval_sequences": 1,
        "lr_schedule": "constant",
        "warmup_steps": 0,
    },
}


class _Rows:
    """Notes times and losses of steps."""

    def __init__(self) -> None:
        self.at: list[float] = []
        self.losses: list[float] = []

    def on_row(self, row: dict[str, Any]) -> None:
        """A row of our metrics."""
        if row["kind"] == "train":
            self.on_step(row["loss"])

    def on_step(self, loss: float) -> None:
        """A step is done."""
        self.at.append(time.perf_counter())
        self.losses.append(loss)


def _resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def run_rank(environment: Any, plain: dict[str, Any], kind: str) -> dict[str, Any]:
    """One run: seconds of a step, losses, and bytes above the start."""
    torch = importlib.import_module("torch")
    build = importlib.import_module("megaasync.train.build")
    prepare = importlib.import_module("megaasync.data.prepare")
    reference = importlib.import_module(".plain", __package__)
    torch.set_num_threads(1)
    config = validate(read(Config, plain))
    prepared = prepare.prepare_data(config.data, vocab_size=config.model.vocab_size, notify=lambda line: None)
    rows = _Rows()
    before = _resident()
    if kind == "ours":
        trainer = build.build_trainer(
            config, environment=environment, prepared=prepared, device=torch.device("cpu"), observer=rows
        )
        trainer.train()
    else:
        model = reference.PlainDecoder(config.model)
        model.draw_as_ours(config.model, seed=config.train.seed)
        tokens = build.load_tokens(config, prepared).train
        source = build.training_source(config, tokens, share=build.DataShare(), device=torch.device("cpu"))
        reference.train_plainly(model, config, source, on_step=rows.on_step)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before
    gaps = [after - earlier for earlier, after in zip(rows.at[WARM:], rows.at[WARM + 1 :], strict=False)]
    return {"step": statistics.median(gaps), "bytes": peak, "losses": rows.losses}


def bench(plain: dict[str, Any]) -> None:
    """Measure and print."""
    for group, values in DEFAULTS.items():
        plain[group].update(values)
    plain["train"]["steps"] = STEPS
    validate(read(Config, plain))
    ratios, more = [], []
    for number in range(ROUNDS):
        found = {}
        for kind in sorted(("ours", "plain"), reverse=number % 2 == 1):
            (found[kind],) = spawn_ranks(run_rank, (plain, kind), world_size=1)
        ours, other = found["ours"], found["plain"]
        apart = max(abs(a / b - 1) for a, b in zip(ours["losses"], other["losses"], strict=True))
        if apart > 1e-4:
            fail(f"the two are not the same training: losses differ by {apart:.2g}", status=1)
        ratios.append(ours["step"] / other["step"])
        more.append(ours["bytes"] / other["bytes"])
        print(
            f"round {number + 1}: ours {ours['step'] * 1e3:.1f} ms, {ours['bytes'] / 2**20:.0f} MiB; plain torch "
            f"{other['step'] * 1e3:.1f} ms, {other['bytes'] / 2**20:.0f} MiB; losses apart {apart:.1g}",
            flush=True,
        )
    print(
        f"ours over plain torch: time {statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f}), "
        f"memory {statistics.median(more):.3f}"
    )


def main() -> None:
    """Entry point."""
    run_config_tool(bench, __doc__)


if __name__ == "__main__":
    main()
