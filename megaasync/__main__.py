"""megaasync COMMAND ...: one entry point for the commands; without one it lists them."""

import importlib
import sys

import megaasync
from megaasync.entry.console import tolerate_console

# command -> (module with a `main`, arguments that come first, what it does)
COMMANDS: dict[str, tuple[str, tuple[str, ...], str]] = {
    "pretrain": ("megaasync.pretrain", (), "one run; -m makes a sweep"),
    "plan": ("megaasync.pretrain", ("dry_run=true",), "what a run will need, without starting it"),
    "launch": ("megaasync.launch", (), "write and submit the whole cluster job of a run"),
    "checkpoint": ("megaasync.checkpoint.__main__", (), "list, verify or describe checkpoints"),
}
_TOOLS = {
    "tools/preprocess_data.py": "text to token files",
    "tools/train_tokenizer.py": "a tokenizer from text",
    "tools/draw_schedule.py": "a schedule as a picture",
    "tools/bench_pipeline.py": "every schedule's throughput side by side",
    "tools/delay_study.py": "optimizers under delay",
}


def _list() -> None:
    print(f"megaasync {megaasync.__version__}: pretraining with asynchronous pipeline parallelism\n")
    for command, (_, _, does) in COMMANDS.items():
        print(f"  megaasync {command:24} {does}")
    for tool, does in _TOOLS.items():
        print(f"  python {tool:27} {does}, from a checkout")
    print("\nEach has --help. python -m megaasync.pretrain and python -m megaasync.launch do the same.")


def main() -> int:
    """Entry point; returns the exit status."""
    command = sys.argv[1] if len(sys.argv) > 1 else ""
    if command in COMMANDS:
        module, first, _ = COMMANDS[command]
        # a program that is installed too, so that a launch records a command that can be run again
        program = f"megaasync-{module.split('.')[1]}" if module.count(".") == 1 else f"megaasync {command}"
        sys.argv = [program, *first, *sys.argv[2:]]
        return importlib.import_module(module).main() or 0
    tolerate_console()
    if command and command not in ("-h", "--help", "--version"):
        print(f"error: {command}: no such command; megaasync --help lists them", file=sys.stderr)
        return 2
    _list()
    return 0


if __name__ == "__main__":
    sys.exit(main())
