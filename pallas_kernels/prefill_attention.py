"""Attention of a prompt's chunk: against the cache it is already in, or a ring and itself.

Rows are grouped as in decode: G heads x neighbouring positions fill a tile, so that a key block is
read once for all of them, at every head dim up to 512. Tiles skip the blocks that they cannot see.
The local form reads the ring as it was before the chunk, because a chunk longer than the ring's
slack would overwrite keys that its first rows need.
"""

from pallas_kernels import reference, tiles
from pallas_kernels.dispatch import check_shapes, refusal, resolve
from pallas_kernels.key_sources import Chunk, Linear, RingHistory
from pallas_kernels.split_kv import attend


def prefill_attention(
    q, k_cache, v_cache, starts, ends, *, k_norm=None, window=None, impl=None, tile=None
):
    """Causal attention of a chunk over a linear cache that holds the chunk's keys already.

    Args and layouts as in `grouped_attention`; T is not bounded. Rows at or past `ends` are
    padding: their output is finite and means nothing.
    """
    check_shapes("prefill_attention", q, k_cache, v_cache, starts, ends, k_norm=k_norm)
    num_new, heads, head_dim = q.shape[1:]
    kv_heads, size = v_cache.shape[1:3]
    reason = refusal(q, k_cache, v_cache)
    impl = resolve("prefill_attention", impl, q, k_cache, v_cache, reason)
    if impl == "xla":
        return reference.grouped_attention(
            q, k_cache, v_cache, starts, ends, k_norm=k_norm, window=window
        )
    rotated = 0 if k_norm is None else k_cache.shape[3]
    tile = tile or tiles.prefill_tile(
        rows=num_new * heads // kv_heads,
        head_dim=head_dim,
        rotated=rotated,
        device=tiles.current_device(),
    )
    return attend(
        q,
        [(k_cache, v_cache)],
        starts,
        ends,
        name="carat_prefill_attention" + ("_v_rot" if rotated else "_kv"),
        sources=(Linear(size),),
        window=window,
        tile=tile,
        k_norm=k_norm,
        interpret=impl == "interpret",
    )


def prefill_ring_attention(
    q, k_ring, v_ring, k_new, v_new, starts, ends, *, window, impl=None, tile=None
):
    """Windowed causal attention of a chunk over the ring before it and the chunk itself.

    Args:
      q: [B, T, N, H]; row t of slot b sits at position starts[b] + t.
      k_ring: [B, K, C, H], the ring before the chunk is written: positions below starts[b].
      v_ring: [B, K, C, H].
      k_new: [B, T, K, H], the chunk's keys.
      v_new: [B, T, K, H].
      starts: int32 [B].
      ends: int32 [B], one past the chunk's last valid position; rows from there on are padding.
      window: a key is visible to a query iff 0 <= query's position - key's position < window.
      impl: "triton", "xla", "interpret", or None for Triton on a GPU and xla elsewhere.
      tile: overrides the tile choice.

    Returns:
      [B, T, N, H] in the rings' dtype.
    """
    kernel = "prefill_ring_attention"
    check_shapes(kernel, q, k_ring, v_ring, starts, ends)
    num_new, heads, head_dim = q.shape[1:]
    slots, kv_heads, capacity = k_ring.shape[:3]
    chunk = (slots, num_new, kv_heads, head_dim)
    if k_new.shape != chunk or v_new.shape != chunk:
        raise ValueError(f"{kernel}: k_new {k_new.shape}, v_new {v_new.shape} must be {chunk}")
    if capacity < window - 1:
        raise ValueError(f"{kernel}: a ring of {capacity} slots is too short for {window=}")
    reason = refusal(q, k_ring, v_ring)
    if capacity % 16:
        reason = f"a ring of {capacity} slots is not a multiple of 16"
    impl = resolve(kernel, impl, q, k_ring, v_ring, reason)
    if impl == "xla":
        return reference.prefill_ring_attention(
            q, k_ring, v_ring, k_new, v_new, starts, ends, window=window
        )
    tile = tile or tiles.prefill_tile(
        rows=num_new * heads // kv_heads,
        head_dim=head_dim,
        capacity=capacity,
        device=tiles.current_device(),
    )
    return attend(
        q,
        [(k_ring, v_ring), (k_new, v_new)],
        starts,
        ends,
        name="carat_prefill_ring_attention",
        sources=(RingHistory(capacity), Chunk(num_new)),
        window=window,
        tile=tile,
        interpret=impl == "interpret",
    )
