"""A layer's norms, RoPE, cache rows and attention in one kernel, over its own cache or another's.

The separate operations (norms, RoPE, cache rows, attention) are right everywhere; this route takes
the short steps of rings and of whole key-value caches, where launches cost more than bytes.
"""

import dataclasses

from carat_jax.array_types import Array, Float, Lengths, Queries
from carat_jax.cache.linear import LinearCache
from carat_jax.cache.ring import RingCache
from carat_jax.numerics.attention import LinearView, RingView
from carat_jax.numerics.options import ComputeOptions
from pallas_kernels.append_attention import MAX_ROWS, append_attention, borrow_attention
from pallas_kernels.tiles import MAX_POSITIONS


@dataclasses.dataclass(frozen=True)
class Projection:
    """What a layer's fused projection gives for T new positions, and how heads come from it.

    Attributes:
      qkv: of each KV head its G queries, its key and its value, `[B, T, K, G + 2, H]`; `G + 1`
        where the key is the value as well.
      group: G.
      q_norm, k_norm: weights of the norms, `[H]`.
      eps: of the norms.
      tables: cosine and sine of the positions' angles, `[B, T, H / 2]`.
    """

    qkv: Float[Array, "B T K parts H"]
    group: int
    q_norm: Float[Array, "H"]
    k_norm: Float[Array, "H"]
    eps: float
    tables: tuple[Float[Array, "B T half"], Float[Array, "B T half"]]


def fits_one_kernel(keys: object, num_rows: int, group: int, options: ComputeOptions) -> bool:
    """Whether one kernel serves `num_rows` positions of every slot of this cache, or this view."""
    if not options.joins_rows:
        return False
    if num_rows > MAX_POSITIONS or num_rows * group > MAX_ROWS:
        return False
    if isinstance(keys, RingCache | RingView):
        return True
    is_linear = isinstance(keys, LinearCache | LinearView)
    return is_linear and options.is_fused and options.group_heads


def append_attend(
    cache: RingCache | LinearCache,
    new: Projection,
    starts: Lengths,
    num_valid: Lengths,
    window: int | None,
    options: ComputeOptions,
) -> tuple[RingCache | LinearCache, Queries]:
    """The cache with the new positions in it, and what their queries read.

    Args:
      cache: one that `fits_one_kernel`.
      new: the projection of T new positions of every slot.
      starts: positions already in each slot, `[B]`.
      num_valid: how many of the T rows are real, `[B]`; the others are not written.
      window: W of the layer, None on a global one.
      options: how attention is computed.
    """
    out, k, v = append_attention(
        new.qkv, new.q_norm, new.k_norm, *new.tables, cache.k, cache.v, starts, starts + num_valid,
        group=new.group, eps=new.eps, window=window, is_ring=isinstance(cache, RingCache),
        impl=options.impl,
    )  # fmt: skip
    return type(cache)(k, v), out


def borrow_attend(
    view: RingView | LinearView,
    q: Float[Array, "B T K G H"],
    q_norm: Float[Array, "H"],
    eps: float,
    tables: tuple[Float[Array, "B T half"], Float[Array, "B T half"]],
    starts: Lengths,
    window: int | None,
    options: ComputeOptions,
) -> Queries:
    """What a layer without keys of its own reads: `q` as projected, the rest as `append_attend`.

    Args:
      view: what another layer's cache shows, one that `fits_one_kernel`.
      starts: position of each slot's first query.
    """
    is_ring = isinstance(view, RingView)
    base = 0 if is_ring else view.base
    return borrow_attention(
        q, q_norm, *tables, view.k, view.v, starts - base, view.ends - base,
        eps=eps, window=window, is_ring=is_ring, impl=options.impl,
    )  # fmt: skip
