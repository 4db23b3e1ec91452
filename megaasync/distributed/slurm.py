"""What SLURM says in its environment variables about a job step: nodes, ranks and where to meet. Imports no torch."""

import re
from collections.abc import Iterator, Mapping
from itertools import product

from megaasync.config import ConfigError

_FIRST_PORT, _PORTS = 10_000, 20_000  # below Linux's ephemeral ports, which begin at 32768


def _parts(text: str) -> Iterator[str]:
    """Split at commas that are not inside brackets."""
    depth, start = 0, 0
    for index, letter in enumerate(text):
        depth += (letter == "[") - (letter == "]")
        if letter == "," and depth == 0:
            yield text[start:index]
            start = index + 1
    yield text[start:]


def _numbers(inside: str) -> list[str]:
    """`1,03-05` to 1, 03, 04, 05; the width of a range's start is kept."""
    found = []
    for part in inside.split(","):
        low, dash, high = part.partition("-")
        if not low.isdecimal() or (dash and not high.isdecimal()) or (dash and int(high) < int(low)):
            raise ValueError(part)
        found += [str(number).zfill(len(low)) for number in range(int(low), int(high or low) + 1)]
    return found


def expand_nodes(node_list: str) -> list[str]:
    """The host names of a node list, in its order.

    Args:
        node_list: as in SLURM_JOB_NODELIST: names, with numbers in brackets: `a1,b[02-04,7]-ib,r[1-2]n[1-3]`.

    Raises:
        ConfigError: it cannot be read.

    Example:
        >>> expand_nodes("gpu[08-10],login")
        ['gpu08', 'gpu09', 'gpu10', 'login']
    """
    names = []
    for part in _parts(node_list.strip()):
        pieces = re.split(r"\[([^\[\]]*)\]", part)  # text, inside of brackets, text, ...
        try:
            choices = [[piece] if index % 2 == 0 else _numbers(piece) for index, piece in enumerate(pieces)]
        except ValueError:
            choices = []
        if not part or not choices or any("[" in piece or "]" in piece for piece in pieces[::2]):
            raise ConfigError(
                f"SLURM_JOB_NODELIST={node_list}: {part!r} is no list of nodes; it should be as in gpu[01-04],login"
            )
        names += ["".join(choice) for choice in product(*choices)]
    return names


def expand_tasks(tasks_per_node: str) -> list[int]:
    """Ranks on each node: `2(x3),1` to 2, 2, 2, 1.

    Raises:
        ConfigError: it cannot be read.
    """
    counts = []
    for part in tasks_per_node.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if match is None:
            raise ConfigError(f"SLURM_TASKS_PER_NODE={tasks_per_node}: cannot be read; it should be as in 8(x4)")
        counts += [int(match.group(1))] * int(match.group(2) or 1)
    return counts


def port_of(job: int, step: int) -> int:
    """A port that all ranks of a job step know without asking, other jobs' being elsewhere."""
    return _FIRST_PORT + (job * 7 + step) % _PORTS


def rendezvous_endpoint(environment: Mapping[str, str]) -> tuple[str, int]:
    """Host and port at which the ranks of a step meet, if nobody has said it: the first node, a port by the job.

    Raises:
        ConfigError: the node list is missing or cannot be read.
    """
    nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST")
    if not nodes:
        raise ConfigError("SLURM_JOB_NODELIST: is not set; start with srun inside a job, or set MASTER_ADDR")
    job, step = environment.get("SLURM_JOB_ID", "0"), environment.get("SLURM_STEP_ID", "0")
    return expand_nodes(nodes)[0], port_of(*(int(number) if number.isdecimal() else 0 for number in (job, step)))
