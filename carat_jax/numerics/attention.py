"""Attention of new positions to cached keys, and the one rule of who sees whom.

Key j is visible to query i iff 0 <= i - j < window, positions absolute, window infinite on a
global layer. A cache entry that holds nothing has a negative position and is visible to nobody;
what memory such an entry contains (zeros, old rows, NaN) never reaches a result.

`KeyView` is what a layer's queries may look at. Layers that share a cache share the view.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from carat_jax.array_types import Array, Bool, CacheRows, Float, Int, Positions, Queries
from carat_jax.numerics.layers import precision

# Scores held at once, in elements: above this the queries are taken in blocks (1 GiB of float32).
_MAX_SCORES = 2**28


@dataclasses.dataclass(frozen=True)
class KeyView:
    """Keys and values as the queries of one step see them.

    Attributes:
      k: keys, rotated and normed, `[B, K, S, H]`.
      v: values, same shape.
      positions: absolute position of every entry, `[B, S]`, negative where there is none.
    """

    k: CacheRows
    v: CacheRows
    positions: Int[Array, "B S"]


def visible(
    query_pos: Positions, key_pos: Int[Array, "B S"], window: int | None
) -> Bool[Array, "B T S"]:
    """Which key each query may see. The only place this rule is written."""
    distance = query_pos[:, :, None] - key_pos[:, None, :]
    seen = (distance >= 0) & (key_pos[:, None, :] >= 0)
    return seen if window is None else seen & (distance < window)


def attend(q: Queries, query_pos: Positions, view: KeyView, window: int | None) -> Queries:
    """Softmax attention with unscaled scores; query head n reads KV head n // (N / K).

    Scores and softmax are float32; probabilities are rounded to the values' type, as in
    transformers. A query that sees nothing gets zeros.
    """
    num_slots, num_queries, num_heads, _ = q.shape
    block = max(1, _MAX_SCORES // (num_slots * num_heads * view.k.shape[2]))
    # 0 * NaN is NaN: values nobody may see are cleared, not only given probability zero.
    v = jnp.where((view.positions >= 0)[:, None, :, None], view.v, 0)
    if block >= num_queries:
        return _attend_block(q, visible(query_pos, view.positions, window), view.k, v)
    pad = -num_queries % block
    blocks = jax.tree.map(
        lambda x: jnp.moveaxis(
            jnp.pad(x, ((0, 0), (0, pad)) + ((0, 0),) * (x.ndim - 2)).reshape(
                num_slots, -1, block, *x.shape[2:]
            ),
            1,
            0,
        ),
        (q, query_pos),
    )
    out = lax.map(
        lambda b: _attend_block(b[0], visible(b[1], view.positions, window), view.k, v), blocks
    )
    return jnp.moveaxis(out, 0, 1).reshape(num_slots, -1, *q.shape[2:])[:, :num_queries]


def _attend_block(
    q: Queries, mask: Bool[Array, "B T S"], k: CacheRows, v: CacheRows
) -> Float[Array, "B T N H"]:
    num_slots, num_queries, num_heads, head_dim = q.shape
    grouped = q.reshape(num_slots, num_queries, k.shape[1], -1, head_dim)
    scores = jnp.einsum(
        "btkgh,bksh->bkgts",
        grouped,
        k,
        precision=precision(q.dtype),
        preferred_element_type=jnp.float32,
    )
    mask = mask[:, None, None]
    scores = jnp.where(mask, scores, -jnp.inf)
    top = jnp.max(scores, axis=-1, keepdims=True)
    weights = jnp.where(mask, jnp.exp(scores - jnp.where(jnp.isfinite(top), top, 0)), 0)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    probs = (weights / jnp.where(total > 0, total, 1)).astype(v.dtype)
    out = jnp.einsum(
        "bkgts,bksh->btkgh",
        probs,
        v,
        precision=precision(q.dtype),
        preferred_element_type=jnp.float32,
    )
    return out.reshape(num_slots, num_queries, num_heads, head_dim).astype(q.dtype)
