"""Every legal size of every schedule."""

import itertools

from megaasync.schedules import (
    SCHEDULES,
    build_schedule,
)

SIZES = list(itertools.product(range(1, 7), range(1, 11)))  # (P, m)


CHUNKS = {"interleaved_1f1b": (2, 3), "interleaved_2bw": (2, 3), "zbv": (2,), "wpipe": (2,)}


def chunks_of(name):
    """Stages per rank that are tried."""
    return CHUNKS.get(name, (SCHEDULES[name].virtual_stages[0],))


def build(name, ranks, microbatches, virtual_stages=None, extra=0, tied=False):
    return build_schedule(
        name,
        num_ranks=ranks,
        num_microbatches=microbatches,
        virtual_stages=virtual_stages,
        extra_in_flight=extra,
        tied=tied,
    )


def is_defined(name, p, m, extra=0):
    """Written apart from the schedules: for which sizes each is promised."""
    if name == "pipedream":
        return m == 1
    if name.startswith("interleaved") and (m % p or (1 + extra) * (p - 1) > 2 * p):
        return False
    if name == "2bw":
        return m >= (1 + extra) * (p - 1)
    if name == "interleaved_2bw":  # v m >= (v - 1) P + (1 + e)(P - 1), for the least v tried
        return 2 * m >= p + (1 + extra) * (p - 1)
    return True


LEGAL = [
    (name, p, m, virtual_stages, extra)
    for name, kind in SCHEDULES.items()
    for p, m in SIZES
    for virtual_stages in chunks_of(name)
    for extra in ((0, 1, 2) if kind.takes_extra_in_flight else (0,))
    if is_defined(name, p, m, extra)
]
