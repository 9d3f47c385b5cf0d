"""The baseline of grouped attention: one fused program per query head, T rows each, no splits.

Every query head reads its KV head's keys again, and a program walks the whole context alone: what a
general engine's fused kernel does for verification. Kept to measure what grouping is worth.
"""

from pallas_kernels import reference, tiles
from pallas_kernels.dispatch import check_shapes, refusal, resolve
from pallas_kernels.key_sources import Linear
from pallas_kernels.split_kv import attend


def per_head_attention(q, k_cache, v_cache, starts, ends, *, window=None, impl=None, tile=None):
    """As `grouped_attention` with the layout `kv`, head by head."""
    check_shapes("per_head_attention", q, k_cache, v_cache, starts, ends)
    num_new, _, head_dim = q.shape[1:]
    reason = refusal(q, k_cache, v_cache, max_rows=tiles.MAX_ROWS, rows=num_new)
    impl = resolve("per_head_attention", impl, q, k_cache, v_cache, reason)
    if impl == "xla":
        return reference.grouped_attention(q, k_cache, v_cache, starts, ends, window=window)
    tile = tile or tiles.per_head_tile(
        rows=num_new, head_dim=head_dim, device=tiles.current_device()
    )
    return attend(
        q,
        [(k_cache, v_cache)],
        starts,
        ends,
        name="carat_per_head_attention",
        sources=(Linear(v_cache.shape[2]),),
        window=window,
        tile=tile,
        per_head=True,
        interpret=impl == "interpret",
    )
