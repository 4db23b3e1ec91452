"""megaasync COMMAND ...: one entry point for the commands; without one it lists them."""

import importlib
import sys
from dataclasses import dataclass
from pathlib import Path

import megaasync
from megaasync.entry.console import tolerate_console


@dataclass(frozen=True, slots=True)
class Command:
    """What a command runs.

    Attributes:
        module: has a `main`; those of tools begin with "tools.".
        does: one line for the list.
        first: arguments that come before the user's.
    """

    module: str
    does: str
    first: tuple[str, ...] = ()


COMMANDS = {
    "pretrain": Command("megaasync.pretrain", "one run; -m makes a sweep"),
    "plan": Command("megaasync.pretrain", "what a run will need, without starting it", ("dry_run=true",)),
    "launch": Command("megaasync.launch", "write and submit the whole cluster job of a run"),
    "checkpoint": Command("megaasync.checkpoint.__main__", "list, verify or describe checkpoints"),
    "data tokenizer": Command("tools.data.train_tokenizer", "a sentencepiece model from text"),
    "data preprocess": Command("tools.data.preprocess", "text, jsonl, parquet or a hub dataset to token files"),
    "study delay": Command("tools.study.delay_study", "optimizers under delay: many small runs, tables, pictures"),
    "study theory": Command("tools.study.delay_theory", "convergence under delay beside what theory bounds"),
    "study time": Command("tools.study.time_to_loss", "wall-clock time to the synchronous run's loss"),
    "bench pipeline": Command("tools.bench.pipeline", "throughput of every schedule side by side"),
    "bench step": Command("tools.bench.step", "one rank's step against a plain torch loop"),
    "bench save": Command("tools.bench.save", "what a checkpoint costs the training"),
    "bench muon": Command("tools.bench.muon_step", "Muon's step against a loop over the matrices"),
    "bench plan": Command("tools.bench.measure_plan", "a plan against fake tensors that are counted"),
    "bench draw": Command("tools.bench.draw_schedule", "a schedule as text and as a picture"),
    "bench gpu": Command("tools.bench.gpu_check", "what a GPU has to show, in eight minutes"),
}


def _list() -> None:
    print(f"megaasync {megaasync.__version__}: pretraining with asynchronous pipeline parallelism\n")
    for name, command in COMMANDS.items():
        print(f"  megaasync {name:16} {command.does}")
    print("\nEach has --help. python -m megaasync.pretrain and python -m megaasync.launch do the same.")


def _find(arguments: list[str]) -> tuple[str, int]:
    """(the command that the first one or two arguments name, how many they are); an empty name if there is none."""
    for words in (1, 2):
        name = " ".join(arguments[:words])
        if len(arguments) >= words and name in COMMANDS:
            return name, words
    return "", 0


def _module_of(command: Command) -> str:
    """Its importable name: tools are inside the package where it is installed, beside it in a checkout."""
    if not command.module.startswith("tools."):
        return command.module
    package = Path(megaasync.__file__).resolve().parent
    if (package / "tools" / "__init__.py").exists():
        return f"megaasync.{command.module}"
    sys.path.insert(0, str(package.parent))  # of this checkout, even if another one is installed
    return command.module


def _unknown(arguments: list[str]) -> str:
    group = [name for name in COMMANDS if name.startswith(f"{arguments[0]} ")]
    if group:
        return f"{' '.join(arguments[:2])}: give one of {', '.join(group)}"
    return f"{arguments[0]}: no such command; megaasync --help lists them"


def main() -> int:
    """Entry point; returns the exit status."""
    arguments = sys.argv[1:]
    name, words = _find(arguments)
    if name:
        command = COMMANDS[name]
        # a program that is installed too, so that a launch records a command that can be run again
        has_program = command.module in ("megaasync.pretrain", "megaasync.launch")
        program = command.module.replace(".", "-") if has_program else f"megaasync {name}"
        sys.argv = [program, *command.first, *arguments[words:]]
        return importlib.import_module(_module_of(command)).main() or 0
    tolerate_console()
    if arguments and arguments[0] not in ("-h", "--help", "--version"):
        print(f"error: {_unknown(arguments)}", file=sys.stderr)
        return 2
    _list()
    return 0


if __name__ == "__main__":
    sys.exit(main())
