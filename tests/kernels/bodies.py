"""The one body that runs a case through its public function; tests and benchmarks share it."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

import pallas_kernels as kernels
from pallas_kernels import tiles

FUNCTIONS = {
    "ring": kernels.ring_attention,
    "grouped": kernels.grouped_attention,
    "v_rot": kernels.grouped_attention,
    "per_head": kernels.per_head_attention,
    "prefill": kernels.prefill_attention,
    "prefill_v_rot": kernels.prefill_attention,
    "prefill_ring": kernels.prefill_ring_attention,
}


def call(case, impl, **more):
    """A function of the case's arrays, to be jitted, or lowered with only their shapes."""

    def run(q, caches, norm, starts, ends):
        options = dict(more)
        if case.rotated:
            options["k_norm"] = norm
        if case.window is not None:
            options["window"] = case.window
        return FUNCTIONS[case.kernel](q, *caches, starts, ends, impl=impl, **options)

    return run


def tile(case, device="NVIDIA H200"):
    """The tile that the case's kernel takes on a device."""
    rows = case.num_new * case.heads // case.kv_heads
    shape = {"rows": rows, "head_dim": case.head_dim, "device": device}
    if case.kernel == "ring":
        return tiles.ring_tile(**shape, capacity=case.size)
    if case.kernel == "per_head":
        return tiles.per_head_tile(**{**shape, "rows": case.num_new})
    if case.kernel == "prefill_ring":
        return tiles.prefill_tile(**shape, capacity=case.size)
    if case.kernel.startswith("prefill"):
        return tiles.prefill_tile(**shape, rotated=case.rotated)
    return tiles.grouped_tile(**shape, kv_heads=case.kv_heads, rotated=case.rotated)


def few_splits(case):
    """A tile with at most three splits: the interpreter runs one program after another."""
    chosen = tile(case)
    splits = chosen.splits if case.kernel == "ring" else min(chosen.splits, 3)
    return dataclasses.replace(chosen, splits=splits)


def shapes(case, dtype=jnp.bfloat16):
    """Shapes of the case's arrays, for lowering."""
    of = jax.ShapeDtypeStruct
    slots, kv_heads, dim = len(case.ends), case.kv_heads, case.head_dim
    q = of((slots, case.num_new, case.heads, dim), jnp.float32 if case.rotated else dtype)
    caches = (
        of((slots, kv_heads, case.size, case.rotated or dim), dtype),
        of((slots, kv_heads, case.size, dim), dtype),
    )
    if case.kernel == "prefill_ring":
        caches += (of((slots, case.num_new, kv_heads, dim), dtype),) * 2
    positions = of((slots,), jnp.int32)
    return q, caches, of((dim,), dtype), positions, positions


def arrays(case, inputs, dtype):
    """The case's inputs on the device; queries of v_rot stay float32."""
    norm = None if inputs.k_norm is None else jnp.asarray(inputs.k_norm, dtype)
    q = jnp.asarray(inputs.q, jnp.float32 if case.rotated else dtype)
    caches = tuple(jnp.asarray(x, dtype) for x in inputs.caches)
    return q, caches, norm, jnp.array(case.starts, jnp.int32), jnp.array(case.ends, jnp.int32)


def relative_error(got, want):
    """Frobenius norm of the difference over that of the expected values."""
    return float(np.linalg.norm(got - want) / max(np.linalg.norm(want), 1e-30))
