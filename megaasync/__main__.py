"""python -m megaasync: what there is."""

import sys

import megaasync
from megaasync.entry.console import tolerate_console

_COMMANDS = {
    "python -m megaasync.pretrain": "one run; dry_run=true prints its plan, -m makes a sweep",
    "python -m megaasync.launch": "write and submit the whole cluster job of a run",
    "python -m megaasync.checkpoint": "list, verify or describe checkpoints",
    "python tools/preprocess_data.py": "text to token files, from a checkout",
    "python tools/train_tokenizer.py": "a tokenizer from text",
    "python tools/draw_schedule.py": "a schedule as a picture",
    "python tools/bench_pipeline.py": "every schedule's throughput side by side",
    "python tools/delay_study.py": "optimizers under delay",
}


def main() -> int:
    """Entry point; returns the exit status."""
    tolerate_console()
    print(f"megaasync {megaasync.__version__}: pretraining with asynchronous pipeline parallelism\n")
    for command, does in _COMMANDS.items():
        print(f"  {command:34} {does}")
    print("\nEach has --help.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
