"""Cutting prompts into chunks of the sizes that prefill is compiled for. No jax here."""

import math
from collections.abc import Sequence

import numpy as np

# Positions that take as long to compute as the weights take to read: 790 TFLOP/s over 4.3 TB/s.
_PASS = 184


def next_chunk(length: int, sizes: Sequence[int]) -> int:
    """The size of the next chunk of `length` positions, one of the ascending `sizes`.

    The smallest that holds them all, unless it costs less to fill a smaller one first.
    """
    return _cheapest(length, sizes)[1]


def _cheapest(length: int, sizes: Sequence[int]) -> tuple[float, int]:
    """What prefilling `length` positions costs, in positions, and the chunk to begin with."""
    holds = next((size for size in sizes if size >= length), None)
    at_once = (math.inf if holds is None else holds + _PASS, holds)
    smaller = [size for size in sizes if size < length]
    if not smaller:
        return at_once
    count, rest = divmod(length, smaller[-1])
    apart = count * (smaller[-1] + _PASS) + (_cheapest(rest, sizes)[0] if rest else 0)
    return min(at_once, (apart, smaller[-1]))


def plan_chunks(length: int, sizes: Sequence[int]) -> list[tuple[int, int]]:
    """Cuts `length` positions into `(start, size)` chunks of the compiled `sizes`."""
    chunks, done = [], 0
    while done < length:
        chunks.append((done, next_chunk(length - done, sizes)))
        done += chunks[-1][1]
    return chunks


def padded_row(ids: Sequence[int], size: int) -> tuple[np.ndarray, np.ndarray]:
    """`ids` as a row of `size` tokens, and how many of them are real."""
    row = np.zeros((1, size), np.int32)
    row[0, : len(ids)] = ids
    return row, np.full(1, len(ids), np.int32)
