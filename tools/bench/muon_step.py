"""Muon's step over 48 matrices of the tiny and the 135M model, against a loop over the matrices in the same run.

    python -m tools.bench.muon_step [rounds=5] [matrices=48] [threads=2]

Both step the same weights with the same gradients, in turn, in float32 on the CPU, and must agree.
"""

import statistics
import sys
from dataclasses import dataclass

import torch

from megaasync.config import Config, ConfigError, read
from megaasync.entry.text_values import load_yaml

from ..command_line import compose_plain, one_message, read_pairs, wants_help
from .muon import compare, matrix_shapes

_MATRICES_OF_A_LAYER = 7  # query, key, value, output, gate, up, down


@dataclass(frozen=True, slots=True)
class Options:
    """What is timed.

    Attributes:
        rounds: of each, in turn, after one that is not counted.
        matrices: of each model.
        threads: of torch.
    """

    rounds: int = 5
    matrices: int = 48
    threads: int = 2


def _shapes(model: str, count: int) -> dict[str, tuple[int, ...]]:
    layers = -(-count // _MATRICES_OF_A_LAYER)
    plain = compose_plain([f"model={model}", f"model.num_layers={layers}"])
    config = read(Config, plain).model
    return matrix_shapes(config, range(layers), at_most=count)


def main() -> None:
    """Entry point."""
    if wants_help(Options, __doc__):
        return
    with one_message():
        options = read_pairs(Options, sys.argv[1:], parse=lambda key, value: load_yaml(value))
        for key in ("rounds", "matrices", "threads"):
            if getattr(options, key) < 1:
                raise ConfigError(f"{key}={getattr(options, key)}: must be at least 1")
        torch.set_num_threads(options.threads)
        for model in ("tiny_dense", "smollm2_135m"):
            shapes = _shapes(model, options.matrices)
            times = compare(shapes, rounds=options.rounds, device=torch.device("cpu"))
            print(
                f"{model}: {len(shapes)} matrices, ours {statistics.median(times.ours) * 1e3:.1f} ms, loop "
                f"{statistics.median(times.loop) * 1e3:.1f} ms: {times.ratio:.2f} times as fast "
                f"(apart {times.apart:.1g})",
                flush=True,
            )


if __name__ == "__main__":
    main()
