"""What ranks tell each other in Python objects, seldom."""

from typing import Any

from torch import distributed as dist


def all_gather_object(mine: Any, group: dist.ProcessGroup | None) -> list[Any]:
    """Every rank's object, on every rank, in their order.

    Args:
        mine: picklable.
        group: over gloo; None for a single rank.
    """
    if group is None:
        return [mine]
    found = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, mine, group=group)
    return found
