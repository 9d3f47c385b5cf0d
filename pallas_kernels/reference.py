"""Oracles of the kernels: what each must compute, in float32 and jnp only; also `impl="xla"`.

One rule decides what a query sees: key j is visible to query i iff j exists and 0 <= i - j, and
0 <= i - j < window where there is a window. Positions are absolute. Row t of slot b sits at
position starts[b] + t; keys exist at positions below ends[b]. What does not exist is masked, never
trusted to be zero, and a row that sees nothing gives zeros. Of a mixture's
experts only those that a row chose add to it, whatever the weights of the others hold. Imports
nothing of the package, so that a kernel cannot share a mistake with its oracle.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

# Running maximum of a row that has seen no key: finite, so that no inf - inf can arise.
EMPTY = -3.0e38
# What rows have seen of some keys: (o, top, mass), see `merge_partials`.
Partials = tuple[Float[Array, "B T N H"], Float[Array, "B T N"], Float[Array, "B T N"]]


def merge_partials(partials: Sequence[Partials], dtype: DTypeLike) -> Float[Array, "B T N H"]:
    """Combines [(o, top, mass), ...] of disjoint key sets into attention's output.

    top is a row's largest score, o the sum of exp(score - top) * value, mass that of the weights.
    """
    top = jnp.stack([part[1] for part in partials]).max(0)
    scales = [jnp.exp(part[1] - top) for part in partials]
    o = sum(part[0] * scale[..., None] for part, scale in zip(partials, scales, strict=True))
    mass = sum(part[2] * scale for part, scale in zip(partials, scales, strict=True))
    return (o / jnp.where(mass > 0, mass, 1.0)[..., None]).astype(dtype)


def _attend(q, k, v, q_pos, k_pos, exists, window, partials):
    """q [B,T,N,H], k and v [B,K,J,H], q_pos [B,T], k_pos and exists [B,J]."""
    num_slots, num_new, num_heads, head_dim = q.shape
    kv_heads = k.shape[1]
    f32 = jnp.float32
    grouped = q.astype(f32).reshape(num_slots, num_new, kv_heads, num_heads // kv_heads, head_dim)
    k = jnp.where(exists[:, None, :, None], k.astype(f32), 0.0)
    v_f32 = jnp.where(exists[:, None, :, None], v.astype(f32), 0.0)
    scores = jnp.einsum("btkgh,bkjh->btkgj", grouped, k, precision="highest")
    distance = q_pos[:, :, None] - k_pos[:, None, :]
    visible = (distance >= 0) & exists[:, None, :]
    if window is not None:
        visible &= distance < window
    scores = jnp.where(visible[:, :, None, None, :], scores, -jnp.inf)
    top = jnp.maximum(scores.max(-1), EMPTY)
    weights = jnp.exp(scores - top[..., None])
    o = jnp.einsum("btkgj,bkjh->btkgh", weights, v_f32, precision="highest")
    flat = (num_slots, num_new, num_heads)
    part = o.reshape(q.shape), top.reshape(flat), weights.sum(-1).reshape(flat)
    return part if partials else merge_partials([part], v.dtype)


def _rows(q, starts):
    return starts[:, None] + jnp.arange(q.shape[1])[None]


def full_keys(
    k_rot: Float[Array, "B K S R"], v: Float[Array, "B K S H"], k_norm: Float[Array, "H"]
) -> Float[Array, "B K S H"]:
    """Keys of the `v_rot` layout: k_norm * v, but for the rotated numbers, which are kept."""
    half, rotated_half = v.shape[-1] // 2, k_rot.shape[-1] // 2
    k = v.astype(jnp.float32) * k_norm.astype(jnp.float32)
    k_rot = k_rot.astype(jnp.float32)
    k = k.at[..., :rotated_half].set(k_rot[..., :rotated_half])
    return k.at[..., half : half + rotated_half].set(k_rot[..., rotated_half:])


def ring_attention(
    q: Float[Array, "B T N H"],
    k_ring: Float[Array, "B K C H"],
    v_ring: Float[Array, "B K C H"],
    starts: Int[Array, "B"],
    ends: Int[Array, "B"],
    *,
    window: int,
    partials: bool = False,
) -> Float[Array, "B T N H"] | Partials:
    """Attention over rings: slot p mod C holds the newest position p below ends."""
    capacity = k_ring.shape[2]
    newest = ends[:, None] - 1
    k_pos = newest - (newest - jnp.arange(capacity)[None]) % capacity
    exists = (k_pos >= 0) & (k_pos > starts[:, None] - window)
    return _attend(q, k_ring, v_ring, _rows(q, starts), k_pos, exists, window, partials)


def grouped_attention(
    q: Float[Array, "B T N H"],
    k_cache: Float[Array, "B K S R"],
    v_cache: Float[Array, "B K S H"],
    starts: Int[Array, "B"],
    ends: Int[Array, "B"],
    *,
    k_norm: Float[Array, "H"] | None = None,
    window: int | None = None,
    partials: bool = False,
) -> Float[Array, "B T N H"] | Partials:
    """Attention over caches that keep position p in row p."""
    k = k_cache if k_norm is None else full_keys(k_cache, v_cache, k_norm)
    k_pos = jnp.broadcast_to(jnp.arange(v_cache.shape[2])[None], (q.shape[0], v_cache.shape[2]))
    exists = k_pos < ends[:, None]
    if window is not None:
        exists &= k_pos > starts[:, None] - window
    return _attend(q, k, v_cache, _rows(q, starts), k_pos, exists, window, partials)


def prefill_ring_attention(
    q: Float[Array, "B T N H"],
    k_ring: Float[Array, "B K C H"],
    v_ring: Float[Array, "B K C H"],
    k_new: Float[Array, "B T K H"],
    v_new: Float[Array, "B T K H"],
    starts: Int[Array, "B"],
    ends: Int[Array, "B"],
    *,
    window: int,
) -> Float[Array, "B T N H"]:
    """A chunk against itself and the rings as they were before it was written."""
    capacity, num_new = k_ring.shape[2], q.shape[1]
    newest = starts[:, None] - 1
    old_pos = newest - (newest - jnp.arange(capacity)[None]) % capacity
    new_pos = _rows(q, starts)
    old = (old_pos >= 0) & (old_pos > starts[:, None] - window)
    new = new_pos < jnp.minimum(ends, starts + num_new)[:, None]
    k = jnp.concatenate([k_ring, jnp.swapaxes(k_new, 1, 2)], axis=2)
    v = jnp.concatenate([v_ring, jnp.swapaxes(v_new, 1, 2)], axis=2)
    k_pos = jnp.concatenate([old_pos, new_pos], axis=1)
    exists = jnp.concatenate([old, new], axis=1)
    return _attend(q, k, v, new_pos, k_pos, exists, window, False)


def expert_shares(
    x: Float[Array, "rows D"],
    weights: Float[Array, "rows k"],
    chosen: Int[Array, "rows k"],
    gate_up: Float[Array, "E 2 F D"],
    down: Float[Array, "E D F"],
) -> Float[Array, "rows k D"]:
    """weights[r, k] * down(gelu(gate x[r]) * up x[r]) by expert chosen[r, k], in float32.

    chosen = E gives zeros.
    """
    num_experts, f32 = len(gate_up), jnp.float32
    exact = {"precision": "highest", "preferred_element_type": f32}
    both = jnp.einsum("rd,eufd->eruf", x.astype(f32), gate_up.astype(f32), **exact)
    gated = jax.nn.gelu(both[:, :, 0], approximate=True) * both[:, :, 1]
    parts = jnp.einsum("erf,edf->erd", gated, down.astype(f32), **exact)
    picked = parts[jnp.minimum(chosen, num_experts - 1), jnp.arange(len(x))[:, None]]
    return jnp.where((chosen < num_experts)[..., None], picked * weights[..., None], 0.0)


def expert_mlp(
    x: Float[Array, "rows D"],
    weights: Float[Array, "rows k"],
    chosen: Int[Array, "rows k"],
    gate_up: Float[Array, "E 2 F D"],
    down: Float[Array, "E D F"],
) -> Float[Array, "rows D"]:
    """The sum of `expert_shares` over k, in x's dtype."""
    return expert_shares(x, weights, chosen, gate_up, down).sum(1).astype(x.dtype)


def few_row_product(
    x: Float[Array, "*rows D"], weight: Float[Array, "D O"]
) -> Float[Array, "*rows O"]:
    """x @ weight, summed in float32 and rounded to x's dtype."""
    exact = {"precision": "highest", "preferred_element_type": jnp.float32}
    return jnp.matmul(x.astype(jnp.float32), weight.astype(jnp.float32), **exact).astype(x.dtype)


def gated_row_product(
    gates: Float[Array, "parts *rows P"],
    ups: Float[Array, "*rows L P"],
    layer: Int[Array, ""] | int,
    weight: Float[Array, "P O"],
) -> Float[Array, "*rows O"]:
    """(gelu(sum of gates) * ups[..., layer, :]) @ weight."""
    dtype = ups.dtype
    gate = gates.astype(jnp.float32).sum(0).astype(dtype).astype(jnp.float32)
    up = jax.lax.dynamic_index_in_dim(ups, layer, -2, keepdims=False).astype(jnp.float32)
    return few_row_product((jax.nn.gelu(gate, approximate=True) * up).astype(dtype), weight)


def _rms_norm(x, weight, eps):
    """RMS norm of the last axis in float32, rounded to x's dtype."""
    x32 = x.astype(jnp.float32)
    normed = x32 / jnp.sqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)
    return (normed if weight is None else normed * weight.astype(jnp.float32)).astype(x.dtype)


def residual_norm(
    x: Float[Array, "*rows D"],
    branch: Float[Array, "*parts_and_rows D"],
    branch_weight: Float[Array, "D"],
    *next_weights: Float[Array, "D"],
    scale: Float[Array, "..."] | None = None,
    eps: float,
) -> tuple[Float[Array, "*rows D"], ...]:
    """(x + norm(branch)) * scale, and its norms; a branch of more axes than x is its parts."""
    if branch.ndim > x.ndim:
        branch = branch.astype(jnp.float32).sum(0).astype(x.dtype)
    y = x + _rms_norm(branch, branch_weight, eps)
    if scale is not None:
        y = y * scale
    return y, *(_rms_norm(y, weight, eps) for weight in next_weights)


def mixture_norm(
    x: Float[Array, "*rows D"],
    dense: Float[Array, "*rows D"],
    shares: Float[Array, "*rows k D"],
    chosen: Int[Array, "*rows k"],
    dense_weight: Float[Array, "D"],
    shares_weight: Float[Array, "D"],
    *weights: Float[Array, "D"],
    num_experts: int,
    scale: Float[Array, "..."] | None = None,
    eps: float,
) -> tuple[Float[Array, "*rows D"], ...]:
    """`residual_norm` of norm(dense) + norm(sum of shares), `weights` being its own.

    A share of E is not looked at.
    """
    experts = jnp.where((chosen < num_experts)[..., None], shares, 0.0).sum(-2).astype(x.dtype)
    branch = _rms_norm(dense, dense_weight, eps) + _rms_norm(experts, shares_weight, eps)
    return residual_norm(x, branch, *weights, scale=scale, eps=eps)


def _turned(x, weight, eps, cos, sin, dtype):
    """Heads [B,T,K,heads,H] after norm and RoPE; number i turns with number i + H/2."""
    low, high = jnp.split(_rms_norm(x, weight, eps).astype(jnp.float32), 2, axis=-1)
    cos, sin = cos[:, :, None, None], sin[:, :, None, None]
    return jnp.concatenate([low * cos - high * sin, high * cos + low * sin], -1).astype(dtype)


def borrow_attention(
    q: Float[Array, "B T K G H"],
    q_norm: Float[Array, "H"],
    cos: Float[Array, "B T half"],
    sin: Float[Array, "B T half"],
    k_cache: Float[Array, "B K S H"],
    v_cache: Float[Array, "B K S H"],
    starts: Int[Array, "B"],
    ends: Int[Array, "B"],
    *,
    eps: float,
    window: int | None = None,
    is_ring: bool = False,
) -> Float[Array, "B T N H"]:
    """Queries normed, rotated, and what they read of the caches."""
    q = _turned(q, q_norm, eps, cos, sin, v_cache.dtype)
    attend = ring_attention if is_ring else grouped_attention
    q = q.reshape(*q.shape[:2], -1, q.shape[-1])
    return attend(q, k_cache, v_cache, starts, ends, window=window)


def append_attention(
    qkv: Float[Array, "B T K parts H"],
    q_norm: Float[Array, "H"],
    k_norm: Float[Array, "H"],
    cos: Float[Array, "B T half"],
    sin: Float[Array, "B T half"],
    k_cache: Float[Array, "B K S H"],
    v_cache: Float[Array, "B K S H"],
    starts: Int[Array, "B"],
    ends: Int[Array, "B"],
    *,
    group: int,
    eps: float,
    window: int | None = None,
    is_ring: bool = False,
) -> tuple[Float[Array, "B T N H"], Float[Array, "B K S H"], Float[Array, "B K S H"]]:
    """New rows normed, rotated, put into the caches, and attended from."""
    slots, num_new = qkv.shape[:2]
    capacity, dtype = k_cache.shape[2], v_cache.dtype
    k = _turned(qkv[..., group : group + 1, :], k_norm, eps, cos, sin, dtype)[..., 0, :]
    v = _rms_norm(qkv[..., -1, :], None, eps).astype(dtype)
    position = starts[:, None] + jnp.arange(num_new)
    place = position % capacity if is_ring else position
    place = jnp.where(position < ends[:, None], place, capacity)
    slot = jnp.arange(slots)[:, None]
    k_cache = k_cache.at[slot, :, place].set(k, mode="drop")
    v_cache = v_cache.at[slot, :, place].set(v, mode="drop")
    out = borrow_attention(
        qkv[..., :group, :], q_norm, cos, sin, k_cache, v_cache, starts, ends,
        eps=eps, window=window, is_ring=is_ring,
    )  # fmt: skip
    return out, k_cache, v_cache


def route_experts(
    x: Float[Array, "rows D"],
    scale: Float[Array, "D"],
    proj: Float[Array, "E D"],
    expert_scale: Float[Array, "E"],
    is_token: Bool[Array, "rows"] | None = None,
    *,
    top_k: int,
    eps: float,
) -> tuple[Float[Array, "rows k"], Int[Array, "rows k"]]:
    """Weights and ids of the best experts by the scores proj @ (norm(x) * scale / sqrt(D)).

    Of equal scores the lower id comes first, and a row that holds no token chooses E.
    """
    x, scale, proj, expert_scale = (a.astype(jnp.float32) for a in (x, scale, proj, expert_scale))
    normed = x / jnp.sqrt((x * x).mean(-1, keepdims=True) + eps)
    scores = jnp.einsum("rd,ed->re", normed * scale, proj, precision="highest")
    probs = jax.nn.softmax(scores * x.shape[-1] ** -0.5)
    order = jnp.argsort(-probs, axis=-1, stable=True)[:, :top_k].astype(jnp.int32)
    best = jnp.take_along_axis(probs, order, -1)
    weights = best / best.sum(-1, keepdims=True) * expert_scale[order]
    return weights, order if is_token is None else jnp.where(is_token[:, None], order, len(proj))
