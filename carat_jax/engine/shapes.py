"""The static shapes and choices an engine is compiled for, worked out from its settings.

Pure functions, asked once at the start, but for the cutting of prompts into compiled chunks.
"""

from collections.abc import Sequence

import jax
import numpy as np

from carat_jax.config import Config
from carat_jax.families import ModelConfig
from carat_jax.numerics.options import ComputeOptions
from carat_jax.numerics.padding import EXACT, default_rungs


def compute_options(config: Config) -> ComputeOptions:
    """Which implementations run on this machine under these settings.

    Without a named implementation the rule is: the Pallas kernels on a GPU in bfloat16, plain JAX
    elsewhere.

    Raises:
      ValueError: the implementation named cannot run here; it is never replaced by another.
    """
    return ComputeOptions(
        impl=_implementation("attention.impl", config.attention.impl, config.dtype, "xla"),
        experts=_implementation("moe.impl", config.moe.impl, config.dtype, "dense"),
        is_fused=config.attention.verify == "fused",
        group_heads=config.attention.group_heads,
    )


def _implementation(key: str, impl: str | None, dtype: str, plain: str) -> str:
    """What `key` stands for here: its own value, or by the rule the kernel or `plain` JAX."""
    backend = jax.default_backend()
    if impl is None:
        return "triton" if backend == "gpu" and dtype == "bfloat16" else plain
    if impl == "triton" and backend != "gpu":
        raise ValueError(f"{key}: 'triton' needs a GPU, this is {backend}; use {plain!r}")
    if impl == "triton" and dtype != "bfloat16":
        raise ValueError(f"{key}: 'triton' needs bfloat16, dtype is {dtype}")
    return impl


def max_context(config: Config, model: ModelConfig) -> int:
    """Positions a slot holds.

    Raises:
      ValueError: more were asked for than the model was made for.
    """
    limit, asked = model.max_position_embeddings, config.engine.max_context
    if asked is None:
        return min(limit, 8192)
    if asked > limit:
        raise ValueError(f"engine.max_context: {asked} is above the model's own limit of {limit}")
    return asked


def key_rungs(config: Config, max_context: int) -> tuple[int, ...]:
    """Key counts the three-stage path is compiled for; none where every length is its own."""
    pad = config.attention.pad_keys
    return () if pad == EXACT else default_rungs(pad, max_context)


def plan_chunks(length: int, sizes: Sequence[int]) -> list[tuple[int, int]]:
    """Cuts `length` positions into `(start, size)` chunks of the compiled `sizes` (ascending).

    As many of the largest as fit whole, then the smallest that holds the rest.
    """
    largest = sizes[-1]
    chunks = [(start, largest) for start in range(0, length - largest + 1, largest)]
    done = len(chunks) * largest
    if done < length:
        chunks.append((done, next(size for size in sizes if size >= length - done)))
    return chunks


def padded_row(ids: Sequence[int], size: int) -> tuple[np.ndarray, np.ndarray]:
    """`ids` as a row of `size` tokens, and how many of them are real."""
    row = np.zeros((1, size), np.int32)
    row[0, : len(ids)] = ids
    return row, np.full(1, len(ids), np.int32)


def size_text(num_bytes: int) -> str:
    """Bytes as a person reads them."""
    return f"{num_bytes / 2**20:.1f} MiB" if num_bytes < 2**30 else f"{num_bytes / 2**30:.2f} GiB"
