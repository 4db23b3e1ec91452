"""Throughput of every schedule side by side: our engine and torch.distributed.pipelining, real or emulated compute.

    python tools/bench_pipeline.py [mode=emulated|real] [ranks=4,8] [microbatches_per_rank=1,2] [key=value ...]

Real compute runs the product's trainer (and the same model and optimizer under torch's schedules) on one thread per
rank. Emulated compute sleeps each action's cost over the real transport, so that more ranks than cores can be measured.
Rounds are alternated between the schedules; figures are medians. Writes bench.csv and bench.png into `out`.
"""

import importlib
import sys

from ..command_line import one_message, wants_help
from .options import Bench, read_arguments


def main() -> None:
    """Entry point."""
    if wants_help(Bench, __doc__):
        return
    with one_message():
        bench = read_arguments(sys.argv[1:])
        importlib.import_module(".rounds", __package__).run(bench)  # torch


if __name__ == "__main__":
    main()
