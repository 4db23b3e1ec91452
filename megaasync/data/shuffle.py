"""A permutation of 0 .. n-1 that is computed, not stored: a Feistel network with cycle walking.

Source: Black and Rogaway, "Ciphers with arbitrary finite domains", 2002.

Any rank can ask for any position of any epoch without memory that grows with the data.
"""

import numpy as np

_ROUNDS = 6
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_WORD = (1 << 64) - 1


def _mix(values: np.ndarray, key: int) -> np.ndarray:
    """splitmix64's finalizer on values xor key."""
    x = values ^ np.uint64(key)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def permuted(positions: np.ndarray, *, size: int, seed: int, epoch: int) -> np.ndarray:
    """Where a shuffle of 0 .. size-1, drawn from (seed, epoch), puts each position.

    Args:
        positions: [n] integers in [0, size).
        size: number of items.
        seed: of the run.
        epoch: pass over the data; both choose the permutation.

    Returns:
        [n] int64; a bijection of [0, size).
    """
    half = max(((size - 1).bit_length() + 1) // 2, 1)
    mask = np.uint64((1 << half) - 1)
    shift = np.uint64(half)
    numbers = np.arange(1, _ROUNDS + 1, dtype=np.uint64)
    keys = _mix(_mix(numbers * _GOLDEN, seed & _WORD) * _GOLDEN, epoch & _WORD)
    values = np.array(positions, dtype=np.uint64)
    outside = np.ones(values.shape, dtype=bool)
    while outside.any():
        left, right = values[outside] >> shift, values[outside] & mask
        for key in keys:
            left, right = right, left ^ (_mix(right, int(key)) & mask)
        values[outside] = (left << shift) | right
        outside = values >= size
    return values.astype(np.int64)
