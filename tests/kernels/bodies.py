"""The one body that runs a case through a public function; shared by the test files."""

import jax
import jax.numpy as jnp
import numpy as np

import pallas_kernels as kernels

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
    """A function of the case's arrays, to be jitted, and lowered with only their shapes."""

    def run(q, caches, norm, starts, ends):
        options = dict(more)
        if case.rotated:
            options["k_norm"] = norm
        if case.window is not None:
            options["window"] = case.window
        return FUNCTIONS[case.kernel](q, *caches, starts, ends, impl=impl, **options)

    return run


def arrays(case, inputs, dtype):
    """The case's inputs on the device; queries of v_rot stay float32."""
    norm = None if inputs.k_norm is None else jnp.asarray(inputs.k_norm, dtype)
    q = jnp.asarray(inputs.q, jnp.float32 if case.rotated else dtype)
    caches = tuple(jnp.asarray(x, dtype) for x in inputs.caches)
    return q, caches, norm, jnp.array(case.starts, jnp.int32), jnp.array(case.ends, jnp.int32)


def run(case, inputs, impl, dtype, **more):
    """The output in float32."""
    out = jax.jit(call(case, impl, **more))(*arrays(case, inputs, dtype))
    return jax.tree.map(lambda x: np.asarray(x, np.float32), out)


def relative_error(got, want):
    """Frobenius norm of the difference over that of the expected values."""
    return float(np.linalg.norm(got - want) / max(np.linalg.norm(want), 1e-30))
