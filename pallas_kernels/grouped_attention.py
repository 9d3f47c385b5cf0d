"""Grouped attention of a few new positions over a linear cache: global layers' decode and verify.

The G query heads that share a KV head x T positions are the rows of one matrix, so each key is read
once for all of them. Two layouts: `kv` keeps keys and values; `v_rot`, for layers whose key is
rope(k_norm * value), keeps values and only the rotated numbers of the keys.
"""

from pallas_kernels import reference, tiles
from pallas_kernels.dispatch import check_shapes, refusal, resolve
from pallas_kernels.key_sources import Linear
from pallas_kernels.split_kv import attend


def grouped_attention(
    q,
    k_cache,
    v_cache,
    starts,
    ends,
    *,
    k_norm=None,
    window=None,
    impl=None,
    partials=False,
    tile=None,
):
    """Causal attention over positions below `ends`.

    Args:
      q: [B, T, N, H]; row t of slot b sits at position starts[b] + t. With `v_rot` give it in
        float32, so that it is rounded once, after k_norm is folded in.
      k_cache: [B, K, S, H], row p keeps position p; with `v_rot` [B, K, S, R]: the key's numbers
        0..R/2-1 and H/2..H/2+R/2-1, after k_norm and rotation.
      v_cache: [B, K, S, H].
      starts: int32 [B].
      ends: int32 [B], one past the newest position; rows from there on are never read. 0: an
        unused slot, output zeros. Past S: the cache has no more than S positions.
      k_norm: [H], the weight of the key norm; says that the layout is `v_rot`.
      window: None, or a key is visible iff its distance is below this (a local layer kept in full).
      impl: "triton", "xla", "interpret", or None for Triton on a GPU and xla elsewhere.
      partials: return float32 (o, top, mass) as in `reference.merge_partials`.
      tile: overrides the tile choice.

    Returns:
      [B, T, N, H] in the caches' dtype, or the partials.

    Raises:
      ValueError: the shapes contradict each other, or `impl` is unknown.
      NotImplementedError: a named impl cannot run this shape, dtype or device.
    """
    check_shapes("grouped_attention", q, k_cache, v_cache, starts, ends, k_norm=k_norm)
    num_new, heads, head_dim = q.shape[1:]
    kv_heads, size = v_cache.shape[1:3]
    rows = num_new * heads // kv_heads
    reason = refusal(q, k_cache, v_cache, max_rows=tiles.MAX_ROWS, rows=rows)
    impl = resolve("grouped_attention", impl, q, k_cache, v_cache, reason)
    if impl == "xla":
        return reference.grouped_attention(
            q, k_cache, v_cache, starts, ends, k_norm=k_norm, window=window, partials=partials
        )
    rotated = 0 if k_norm is None else k_cache.shape[3]
    tile = tile or tiles.grouped_tile(
        rows=rows,
        head_dim=head_dim,
        kv_heads=kv_heads,
        rotated=rotated,
        device=tiles.current_device(),
    )
    return attend(
        q,
        [(k_cache, v_cache)],
        starts,
        ends,
        name="carat_grouped_attention" + ("_v_rot" if rotated else "_kv"),
        sources=(Linear(size),),
        window=window,
        tile=tile,
        k_norm=k_norm,
        partials=partials,
        interpret=impl == "interpret",
    )
