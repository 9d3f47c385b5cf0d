"""Attention of new positions to cached keys, and the one rule of who sees whom.

Key j is visible to query i iff 0 <= i - j < window, positions absolute, window infinite on a
global layer. A cache entry that holds nothing has a negative position and is visible to nobody;
what memory such an entry contains (zeros, old rows, NaN) never reaches a result.

A view is what the queries of one step may look at on one layer. Layers that share a cache share
the view. `attend` is plain JAX over any view, or the Pallas kernel for its kind, as the
`ComputeOptions` say; nothing falls back from one to the other.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from carat_jax.array_types import (
    Array,
    Bool,
    CacheRows,
    Float,
    Int,
    Keys,
    Lengths,
    Positions,
    Queries,
    Values,
)
from carat_jax.numerics.layers import product
from carat_jax.numerics.options import PLAIN, ComputeOptions
from pallas_kernels.grouped_attention import grouped_attention
from pallas_kernels.per_head_attention import per_head_attention
from pallas_kernels.prefill_attention import prefill_attention, prefill_ring_attention
from pallas_kernels.ring_attention import ring_attention
from pallas_kernels.tiles import MAX_ROWS

# Scores held at once, in elements: above this the queries are taken in blocks (1 GiB of float32).
MAX_SCORES = 2**28


@dataclasses.dataclass(frozen=True)
class KeyView:
    """Keys and values with the position of each.

    Attributes:
      k: keys, rotated and normed, `[B, K, S, H]`.
      v: values, same shape.
      positions: absolute position of every entry, `[B, S]`, negative where there is none.
    """

    k: CacheRows
    v: CacheRows
    positions: Int[Array, "B S"]

    def scores(self, q: Float[Array, "B T K G H"], num_keys: int) -> Float[Array, "B K G T S"]:
        """Unscaled float32 scores of grouped queries against the first `num_keys` entries."""
        return product("btkgh,bksh->bkgts", q, self.k[:, :, :num_keys])


@dataclasses.dataclass(frozen=True)
class RingView(KeyView):
    """A whole ring `[B, K, C, H]` after `ends` positions were written."""

    ends: Lengths


@dataclasses.dataclass(frozen=True)
class LinearView(KeyView):
    """Rows in order: entry j holds position `base + j`, up to position `ends - 1`."""

    ends: Lengths
    base: Lengths | int = 0


@dataclasses.dataclass(frozen=True)
class ChunkView(KeyView):
    """A cache as it was before a chunk, followed by the chunk's own rows.

    The kernel takes the two parts as they are, `before` and `k_new`, `v_new` `[B, T, K, H]`; the
    joined arrays are there for plain JAX.
    """

    before: KeyView
    k_new: Keys
    v_new: Values
    ends: Lengths


def chunk_view(
    before: KeyView, k: Keys, v: Values, starts: Lengths, num_valid: Lengths
) -> ChunkView:
    """The view of a chunk of T rows, the first `num_valid` of them real, on top of `before`."""
    rows = jnp.arange(k.shape[1])
    positions = jnp.where(rows < num_valid[:, None], starts[:, None] + rows, -1)
    return ChunkView(
        k=jnp.concatenate([before.k, jnp.swapaxes(k, 1, 2)], axis=2),
        v=jnp.concatenate([before.v, jnp.swapaxes(v, 1, 2)], axis=2),
        positions=jnp.concatenate([before.positions, positions], axis=1),
        before=before,
        k_new=k,
        v_new=v,
        ends=starts + num_valid,
    )


@dataclasses.dataclass(frozen=True)
class RotatedView:
    """Values, and the numbers of the keys that are not the values' times a constant.

    Attributes:
      v: values, `[B, K, S, H]`.
      k_rot: rotated numbers of the keys, `[B, K, S, R]`.
      positions: as in `KeyView`.
      ends: positions held, `[B]`.
      key_weight: `k_norm.weight` of the layer, `[H]`: key = weight * value where nothing rotates.
    """

    v: CacheRows
    k_rot: Float[Array, "B K S R"]
    positions: Int[Array, "B S"]
    ends: Lengths
    key_weight: Float[Array, "H"] | None = None

    def fold(self, q: Float[Array, "B T *heads H"]) -> Float[Array, "B T *heads H"]:
        """Moves the key weight into float32 queries, and rounds them, once, to the cache's type."""
        still = jnp.logical_not(_rotated_mask(q.shape[-1], self.k_rot.shape[-1]))
        weight = jnp.where(still, self.key_weight.astype(jnp.float32), 1)
        return (q * weight).astype(self.v.dtype)

    def scores(self, q: Float[Array, "B T K G H"], num_keys: int) -> Float[Array, "B K G T S"]:
        """Unscaled float32 scores of folded queries against the first `num_keys` entries."""
        rotated = self.k_rot.shape[-1]
        q_still = jnp.where(_rotated_mask(q.shape[-1], rotated), 0, q)
        still = product("btkgh,bksh->bkgts", q_still, self.v[:, :, :num_keys])
        turned = product("btkgr,bksr->bkgts", rotated_part(q, rotated), self.k_rot[:, :, :num_keys])
        return still + turned


def rotated_part(x: Float[Array, "*rows H"], num_rotated: int) -> Float[Array, "*rows R"]:
    """The numbers of a head that RoPE turns: the first R / 2 of each half."""
    half, part = x.shape[-1] // 2, num_rotated // 2
    return jnp.concatenate([x[..., :part], x[..., half : half + part]], axis=-1)


def _rotated_mask(head_dim: int, num_rotated: int) -> Bool[Array, "H"]:
    return jnp.arange(head_dim) % (head_dim // 2) < num_rotated // 2


def ring_positions(ends: Lengths, capacity: int) -> Int[Array, "B C"]:
    """The absolute position each slot of a ring holds after `ends` positions; negative if none."""
    newest = ends[:, None] - 1
    return newest - (newest - jnp.arange(capacity)) % capacity


def linear_positions(ends: Lengths, capacity: int) -> Int[Array, "B S"]:
    """The absolute position each slot of a linear cache holds; negative past `ends`."""
    slot = jnp.arange(capacity)
    return jnp.where(slot < ends[:, None], slot, -1)


def visible(
    query_pos: Positions, key_pos: Int[Array, "B S"], window: int | None
) -> Bool[Array, "B T S"]:
    """Which key each query may see: the rule, for all that is plain JAX."""
    distance = query_pos[:, :, None] - key_pos[:, None, :]
    seen = (distance >= 0) & (key_pos[:, None, :] >= 0)
    return seen if window is None else seen & (distance < window)


def attend(
    q: Queries,
    query_pos: Positions,
    view: KeyView | RotatedView,
    window: int | None,
    options: ComputeOptions = PLAIN,
) -> Queries:
    """Softmax attention with unscaled scores; query head n reads KV head n // (N / K).

    Args:
      q: rotated queries; float32 keeps them from being rounded before a `RotatedView` folds its
        key weight into them.
      query_pos: their positions, each slot's in a row.
      view: what they may look at.
      window: W of the layer, None on a global one.
      options: how to compute it.

    Returns:
      The heads' outputs, in the cache's type. A query that sees nothing gets zeros.
    """
    is_short = q.shape[1] * q.shape[2] // view.v.shape[1] <= MAX_ROWS
    has_stages = not options.is_fused and window is None and is_short
    if options.impl == "xla" or has_stages:
        return _attend_plain(q, query_pos, view, window, options)
    starts, impl = query_pos[:, 0], options.impl
    match view:
        case ChunkView(before=RingView() as ring):
            return prefill_ring_attention(
                q.astype(ring.k.dtype), ring.k, ring.v, view.k_new, view.v_new, starts, view.ends,
                window=window, impl=impl,
            )  # fmt: skip
        case RingView():
            return ring_attention(
                q.astype(view.k.dtype), view.k, view.v, starts, view.ends, window=window, impl=impl
            )
        case RotatedView():
            kernel = grouped_attention if is_short else prefill_attention
            return kernel(
                q.astype(jnp.float32), view.k_rot, view.v, starts, view.ends,
                k_norm=view.key_weight, impl=impl,
            )  # fmt: skip
        case LinearView():
            kernel = prefill_attention
            if is_short:
                kernel = grouped_attention if options.group_heads else per_head_attention
            return kernel(
                q.astype(view.k.dtype), view.k, view.v, starts - view.base, view.ends - view.base,
                window=window, impl=impl,
            )  # fmt: skip
    # A paged cache under a long chunk: the baseline has no kernel for its gathered pages.
    return _attend_plain(q, query_pos, view, window, options)


def _attend_plain(
    q: Queries,
    query_pos: Positions,
    view: KeyView | RotatedView,
    window: int | None,
    options: ComputeOptions,
) -> Queries:
    """`attend` in plain JAX: scores and softmax in float32, probabilities in the values' type."""
    num_keys = view.v.shape[2]
    if options.num_keys is not None and window is None:
        num_keys = min(num_keys, options.num_keys)
    # 0 * NaN is NaN: values nobody may see are cleared, not only given probability zero.
    key_pos = view.positions[:, :num_keys]
    v = jnp.where((key_pos >= 0)[:, None, :, None], view.v[:, :, :num_keys], 0)
    q = view.fold(q) if isinstance(view, RotatedView) else q.astype(v.dtype)
    grouped = q.reshape(*q.shape[:2], v.shape[1], -1, q.shape[-1])

    def block(q: Array, query_pos: Array) -> Array:
        mask = visible(query_pos, key_pos, window)[:, None, None]
        if options.group_heads:
            return _stages(view.scores(q, num_keys), mask, v)
        # The baseline: the products of each query head by themselves.
        heads = [
            _stages(view.scores(q[:, :, :, g : g + 1], num_keys), mask, v)
            for g in range(q.shape[3])
        ]
        return jnp.concatenate(heads, axis=3)

    out = _by_blocks(block, grouped, query_pos, MAX_SCORES // (num_keys * q.shape[2]))
    return out.reshape(q.shape)


def _stages(scores: Array, mask: Array, v: Array) -> Array:
    """Softmax over the visible scores, and its product with the values: `[B, T, K, G, H]`."""
    scores = jnp.where(mask, scores, -jnp.inf)
    top = jnp.max(scores, axis=-1, keepdims=True)
    weights = jnp.where(mask, jnp.exp(scores - jnp.where(jnp.isfinite(top), top, 0)), 0)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    probs = (weights / jnp.where(total > 0, total, 1)).astype(v.dtype)
    return product("bkgts,bksh->btkgh", probs, v).astype(v.dtype)


def _by_blocks(function, q: Array, query_pos: Array, max_rows: int) -> Array:
    """`function` over blocks of queries whose rows (all slots together) stay within `max_rows`."""
    num_slots, num_queries = query_pos.shape
    size = max(1, max_rows // num_slots)
    if size >= num_queries:
        return function(q, query_pos)
    pad = -num_queries % size

    def cut(x: Array) -> Array:
        x = jnp.pad(x, ((0, 0), (0, pad), *((0, 0),) * (x.ndim - 2)))
        return jnp.moveaxis(x.reshape(num_slots, -1, size, *x.shape[2:]), 1, 0)

    out = lax.map(lambda block: function(*block), jax.tree.map(cut, (q, query_pos)))
    out = jnp.moveaxis(out, 0, 1)
    return out.reshape(num_slots, -1, *out.shape[3:])[:, :num_queries]
