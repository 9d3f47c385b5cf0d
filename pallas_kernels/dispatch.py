"""Which implementation runs: one rule, and refusals that say the shape and the limit.

`impl=None` takes Triton on a GPU for bfloat16 caches of a supported shape, else the jnp code. A
named impl never falls back: what it cannot do it refuses with NotImplementedError. Shapes that
contradict each other are the caller's error: ValueError. Imports `tiles` only.
"""

import jax
import jax.numpy as jnp

from pallas_kernels.tiles import HEAD_DIMS, WAY_OUT

IMPLS = ("triton", "xla", "interpret")


def check_shapes(kernel, q, k, v, starts, ends, *, k_norm=None):
    """ValueError when the arrays of a call contradict each other."""
    if q.ndim != 4 or k.ndim != 4 or v.ndim != 4:
        raise ValueError(f"{kernel}: q, k and v have 4 axes; got {q.shape}, {k.shape}, {v.shape}")
    slots, _, heads, head_dim = q.shape
    if v.shape[0] != slots or v.shape[3] != head_dim or k.shape[:3] != v.shape[:3]:
        raise ValueError(f"{kernel}: q {q.shape}, k {k.shape} and v {v.shape} do not match")
    if k_norm is None and k.shape != v.shape:
        raise ValueError(f"{kernel}: k {k.shape} must equal v {v.shape} unless k_norm is given")
    if k_norm is not None and (k_norm.shape != (head_dim,) or k.shape[3] > head_dim):
        raise ValueError(f"{kernel}: k_norm {k_norm.shape} and k {k.shape} do not fit {head_dim=}")
    if starts.shape != (slots,) or ends.shape != (slots,):
        raise ValueError(
            f"{kernel}: starts {starts.shape} and ends {ends.shape} must be ({slots},)"
        )
    if heads % v.shape[1]:
        raise ValueError(f"{kernel}: {heads} query heads do not divide over {v.shape[1]} KV heads")


def check_ring(kernel, num_new, capacity, window):
    """ValueError where `num_new` positions in a ring overwrite keys that the first one needs."""
    if num_new > capacity - window + 1:
        raise ValueError(
            f"{kernel}: {num_new} positions need a ring of {window + num_new - 1} slots "
            f"for window={window}; it has {capacity}"
        )


def refusal(q, k, v, *, max_rows=None, rows=0) -> str | None:
    """Why the kernels cannot take these arrays, or None. `rows` is group x positions."""
    head_dim, rotated = q.shape[3], k.shape[3]
    if head_dim not in HEAD_DIMS:
        return f"head_dim {head_dim} is not one of {HEAD_DIMS}"
    if rotated & (rotated - 1) or rotated < 16:
        return f"rotated keys of width {rotated} are not a power of two >= 16"
    if max_rows is not None and rows > max_rows:
        return f"{rows} rows (group x positions) are more than {max_rows}"
    return None


def resolve(kernel, impl, q, k, v, reason: str | None) -> str:
    """`choose` for attention: Triton takes bfloat16 caches, and queries that may be float32."""
    on_triton = None
    if any(d != jnp.bfloat16 for d in (k.dtype, v.dtype)):
        on_triton = f"caches of {k.dtype.name} and {v.dtype.name}: Triton takes bfloat16 only"
    elif q.dtype not in (jnp.bfloat16, jnp.float32):
        on_triton = f"queries of {q.dtype.name}: Triton takes bfloat16 or float32"
    return choose(kernel, impl, reason, on_triton)


def choose(kernel, impl, reason: str | None, on_triton: str | None) -> str:
    """The implementation to run; raises NotImplementedError for a named one that cannot.

    Args:
      kernel: its name, for messages.
      impl: what was asked for.
      reason: why no Pallas kernel can run, or None.
      on_triton: why Triton cannot, though the interpreter can, or None.
    """
    if impl not in (None, *IMPLS):
        raise ValueError(f"{kernel}: impl={impl!r} is not one of {IMPLS} or None")
    if impl == "xla":
        return "xla"
    if impl != "interpret" and reason is None:
        reason = on_triton
    if impl is None:
        return "triton" if reason is None and jax.default_backend() == "gpu" else "xla"
    if reason is not None:
        raise NotImplementedError(f"{kernel}: impl={impl!r} cannot run: {reason}; {WAY_OUT}")
    return impl
