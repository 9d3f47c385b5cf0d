"""What the kernels are measured against, in plain XLA with bfloat16 products.

`three_stage` is where the padded key count shows: its shapes are static. `ring_xla`, `paged` and
`full` are three ways to keep a local layer's keys. Each equals the kernels up to rounding.
"""

import jax
import jax.numpy as jnp

PAGE = 16  # positions of a page


def _softmax_attend(q, k, v, visible):
    """q [B,T,N,H], k and v [B,K,J,H], visible [B,T,J]."""
    slots, num_new, heads, head_dim = q.shape
    kv_heads = k.shape[1]
    grouped = q.reshape(slots, num_new, kv_heads, heads // kv_heads, head_dim)
    grouped = grouped.transpose(0, 2, 3, 1, 4).reshape(slots, kv_heads, -1, head_dim)
    mask = jnp.tile(visible, (1, heads // kv_heads, 1))[:, None]
    scores = jnp.einsum("bkrh,bkjh->bkrj", grouped, k, preferred_element_type=jnp.float32)
    weights = jax.nn.softmax(jnp.where(mask, scores, -jnp.inf), -1).astype(v.dtype)
    out = jnp.einsum("bkrj,bkjh->bkrh", weights, v, preferred_element_type=jnp.float32)
    out = out.reshape(slots, kv_heads, heads // kv_heads, num_new, head_dim)
    return out.transpose(0, 3, 1, 2, 4).reshape(q.shape).astype(q.dtype)


def _causal(starts, num_new, k_pos, window=None):
    distance = (starts[:, None] + jnp.arange(num_new))[:, :, None] - k_pos[:, None, :]
    visible = (distance >= 0) & (k_pos >= 0)[:, None, :]
    return visible if window is None else visible & (distance < window)


def three_stage(q, k_cache, v_cache, starts, *, num_keys):
    """Scores, causal softmax, values: three steps over the first `num_keys` cached keys."""
    k_pos = jnp.arange(num_keys)[None]
    visible = _causal(starts, q.shape[1], k_pos)
    return _softmax_attend(q, k_cache[:, :, :num_keys], v_cache[:, :, :num_keys], visible)


def scores_only(q, k_cache, *, num_keys):
    """The first of the three stages, folded to q's shape so that it can be chained."""
    slots, num_new, heads, head_dim = q.shape
    kv_heads = k_cache.shape[1]
    rows = q.reshape(slots, kv_heads, -1, head_dim)
    scores = jnp.einsum(
        "bkrh,bkjh->bkrj", rows, k_cache[:, :, :num_keys], preferred_element_type=jnp.float32
    )
    return jax.lax.optimization_barrier(scores)[..., :1].reshape(slots, num_new, heads, 1)


def ring_xla(q, k_ring, v_ring, starts, ends, *, window):
    """A ring's slots in place, positions from the head."""
    newest = ends[:, None] - 1
    k_pos = newest - (newest - jnp.arange(k_ring.shape[2])[None]) % k_ring.shape[2]
    return _softmax_attend(q, k_ring, v_ring, _causal(starts, q.shape[1], k_pos, window))


def paged(q, k_pool, v_pool, tables, starts, *, window):
    """The window's pages of pools [pages, PAGE, K, H], found through tables [B, pages]."""
    count = -(-(window + q.shape[1] - 1) // PAGE) + 1
    first = jnp.maximum(starts - window + 1, 0) // PAGE
    index = first[:, None] + jnp.arange(count)[None]
    pages = jnp.take_along_axis(tables, jnp.minimum(index, tables.shape[1] - 1), axis=1)
    k_pos = (index[:, :, None] * PAGE + jnp.arange(PAGE)).reshape(q.shape[0], -1)

    def gather(pool):
        return pool[pages].reshape(q.shape[0], -1, *pool.shape[2:]).transpose(0, 2, 1, 3)

    visible = _causal(starts, q.shape[1], k_pos, window)
    return _softmax_attend(q, gather(k_pool), gather(v_pool), visible)


def full(q, k_cache, v_cache, starts, *, window):
    """The whole context kept, all but the window masked."""
    k_pos = jnp.broadcast_to(jnp.arange(k_cache.shape[2])[None], (q.shape[0], k_cache.shape[2]))
    return _softmax_attend(q, k_cache, v_cache, _causal(starts, q.shape[1], k_pos, window))
