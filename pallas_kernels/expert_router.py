"""Which experts a token takes, in two launches instead of ten: scores, then the choice.

The first kernel norms a row of the residual and multiplies it with the rows of a few experts; the
second takes the best scores one by one and weighs them. All of it in float32, as the choice must
not turn on a rounding.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels import reference
from pallas_kernels.dispatch import choose
from pallas_kernels.tiles import next_power_of_two

MAX_WIDTH = 8192  # float32 numbers of a row that one program keeps in registers


def route_experts(x, scale, proj, expert_scale, is_token=None, *, top_k, eps, impl=None):
    """The `top_k` experts with the best scores proj @ (norm(x) * scale / sqrt(D)), and weights.

    Args:
      x: [R, D], the residual.
      scale: [D].
      proj: [E, D].
      expert_scale: [E], multiplies the weights of each expert.
      is_token: bool [R]; a row that holds no token chooses E, which is no expert. None: all do.
      top_k: experts of a token.
      eps: added to the mean of the squares.
      impl: "triton", "xla", "interpret", or None for Triton on a GPU and xla elsewhere.

    Returns:
      The softmax over the best scores times `expert_scale`, float32 [R, k], and the experts' ids,
      int32 [R, k], the best first and of equal ones the lower. A row of NaN has NaN weights, and
      ids that may repeat.

    Raises:
      ValueError: the shapes contradict each other, or `impl` is unknown.
      NotImplementedError: a named impl cannot run this shape or dtype.
    """
    (rows, width), num_experts = x.shape, len(proj)
    shapes = scale.shape, proj.shape, expert_scale.shape
    if shapes != ((width,), (num_experts, width), (num_experts,)):
        raise ValueError(f"route_experts: x {x.shape} does not fit scale, proj, scales of {shapes}")
    reason = on_triton = None
    if width > MAX_WIDTH:
        reason = f"rows of {width} numbers are more than {MAX_WIDTH}"
    if x.dtype != jnp.bfloat16:
        on_triton = f"rows of {x.dtype.name}: Triton takes bfloat16 only"
    impl = choose("route_experts", impl, reason, on_triton)
    if impl == "xla":
        return reference.route_experts(x, scale, proj, expert_scale, is_token, top_k=top_k, eps=eps)

    def call(name, kernel, grid, out, warps, *arrays):
        kernel.__name__ = kernel.__qualname__ = name
        return pl.pallas_call(
            kernel,
            grid=grid,
            out_shape=out,
            compiler_params=plt.CompilerParams(num_warps=warps, num_stages=1),
            interpret=impl == "interpret",
            name=name,
        )(*arrays)

    # A decode step of the 26B takes 2.80 ms with one pair of experts a program, 2.93 with two. Many
    # rows keep the device busy as it is, and a row is normed again by each of its programs.
    num_pairs = 1 if rows <= 8 else 2
    scores = call(
        "carat_router_scores", _scores_kernel(width, num_experts, eps, num_pairs),
        (pl.cdiv(num_experts, 2 * num_pairs), rows),
        jax.ShapeDtypeStruct((rows, num_experts), jnp.float32), 8, x, scale, proj,
    )  # fmt: skip
    out = [jax.ShapeDtypeStruct((rows, top_k), kind) for kind in (jnp.float32, jnp.int32)]
    return call(
        "carat_router_choice", _choice_kernel(num_experts, top_k), (rows,), out, 1,
        scores, expert_scale, *([] if is_token is None else [is_token.astype(jnp.int32)]),
    )  # fmt: skip


def _scores_kernel(width, num_experts, eps, num_pairs):
    """Scores of some pairs of experts for one row: grid (pairs / `num_pairs`, rows).

    Always summed in pairs, so that a row's bits do not depend on how many rows there are.
    """

    def kernel(x_ref, scale_ref, proj_ref, out_ref):
        row, column = pl.program_id(1), jnp.arange(next_power_of_two(width))
        valid, first = column < width, pl.program_id(0) * num_pairs
        pairs = [(first + i) * 2 + jnp.arange(2) for i in range(num_pairs)]

        def load(at, mask):
            return plt.load(at, mask=mask, other=0.0).astype(jnp.float32)

        x, scale = load(x_ref.at[row, column], valid), load(scale_ref.at[column], valid)
        weights = [
            load(proj_ref.at[pair[:, None], column[None]], (pair < num_experts)[:, None] & valid)
            for pair in pairs
        ]
        factor = lax.rsqrt(jnp.sum(x * x) / width + eps) * width**-0.5
        for pair, proj in zip(pairs, weights, strict=True):
            scores = jnp.sum((x * scale)[None] * proj, 1) * factor
            plt.store(out_ref.at[row, pair], scores, mask=pair < num_experts)

    return kernel


def _choice_kernel(num_experts, top_k):
    """The best scores of one row and their weights: grid (rows,)."""

    def kernel(scores_ref, expert_scale_ref, *refs):
        *is_token, weights_ref, chosen_ref = refs
        row, expert = pl.program_id(0), jnp.arange(next_power_of_two(num_experts))
        known = expert < num_experts
        scores = plt.load(scores_ref.at[row, expert], mask=known, other=-jnp.inf)
        place = jnp.arange(next_power_of_two(top_k))
        best = jnp.full(place.shape, -jnp.inf, jnp.float32)
        chosen = jnp.zeros(place.shape, jnp.int32)
        for k in range(top_k):
            top = scores.max()
            first = jnp.where(scores == top, expert, num_experts - 1).min()
            best, chosen = jnp.where(place == k, top, best), jnp.where(place == k, first, chosen)
            scores = jnp.where(expert == first, -jnp.inf, scores)
        share = jnp.exp(best - best.max())
        scale = plt.load(expert_scale_ref.at[chosen]).astype(jnp.float32)
        for ref in is_token:
            chosen = jnp.where(ref[row] > 0, chosen, num_experts)
        kept = place < top_k
        plt.store(weights_ref.at[row, place], share / share.sum() * scale, mask=kept)
        plt.store(chosen_ref.at[row, place], chosen, mask=kept)

    return kernel
