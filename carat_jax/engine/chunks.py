"""Cutting prompts into chunks of the sizes that prefill is compiled for. No jax here."""

from collections.abc import Sequence

import numpy as np


def next_chunk(length: int, sizes: Sequence[int]) -> int:
    """The size of the next chunk of `length` positions: the largest of the ascending `sizes`.

    Where that would be more than is left, the smallest that holds it.
    """
    return next((size for size in sizes if size >= length), sizes[-1])


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
