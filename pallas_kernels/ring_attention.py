"""Attention of a few new positions over rings: the local layers' decode and verify.

Slot p mod C of a ring keeps the newest position p below the slot's end, so positions are computed
from `ends` and nothing is looked up. The new positions' keys are in the ring already. A ring of
C slots serves T <= C - window + 1 positions: an older row would need a key that is overwritten.
"""

from pallas_kernels import reference, tiles
from pallas_kernels.dispatch import check_ring, check_shapes, refusal, resolve
from pallas_kernels.key_sources import Ring
from pallas_kernels.split_kv import attend


def ring_attention(
    q, k_ring, v_ring, starts, ends, *, window, impl=None, partials=False, tile=None
):
    """Causal attention over the last `window` positions of each slot.

    Args:
      q: [B, T, N, H]; row t of slot b sits at position starts[b] + t.
      k_ring: [B, K, C, H].
      v_ring: [B, K, C, H].
      starts: int32 [B].
      ends: int32 [B], one past the newest position in the ring; 0: an unused slot, output zeros.
      window: a key is visible to a query iff 0 <= query's position - key's position < window.
      impl: "triton", "xla", "interpret", or None for Triton on a GPU and xla elsewhere.
      partials: return float32 (o, top, mass) as in `reference.merge_partials`.
      tile: overrides the tile choice.

    Returns:
      [B, T, N, H] in the rings' dtype, or the partials.

    Raises:
      ValueError: the shapes contradict each other, or `impl` is unknown.
      NotImplementedError: a named impl cannot run this shape, dtype or device.
    """
    check_shapes("ring_attention", q, k_ring, v_ring, starts, ends)
    num_new, heads, head_dim = q.shape[1:]
    kv_heads, capacity = k_ring.shape[1:3]
    rows = num_new * heads // kv_heads
    check_ring("ring_attention", num_new, capacity, window)
    reason = refusal(q, k_ring, v_ring, max_rows=tiles.MAX_ROWS, rows=rows)
    if num_new > tiles.MAX_POSITIONS:
        reason = f"{num_new} positions are more than {tiles.MAX_POSITIONS}"
    if capacity % 16:
        reason = f"a ring of {capacity} slots is not a multiple of 16"
    impl = resolve("ring_attention", impl, q, k_ring, v_ring, reason)
    if impl == "xla":
        return reference.ring_attention(
            q, k_ring, v_ring, starts, ends, window=window, partials=partials
        )
    tile = tile or tiles.ring_tile(
        rows=rows, head_dim=head_dim, capacity=capacity, device=tiles.current_device()
    )
    return attend(
        q,
        [(k_ring, v_ring)],
        starts,
        ends,
        name="carat_ring_attention",
        sources=(Ring(capacity),),
        window=window,
        tile=tile,
        partials=partials,
        interpret=impl == "interpret",
    )
