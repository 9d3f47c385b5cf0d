"""The kernels between two products of a layer, against float64 that rounds where plain JAX does.

On a GPU the same body runs the real widths through Triton.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels as kernels
from tests.kernels.bodies import relative_error
from tests.kernels.lowering import lower

EPS = 1e-6
NUM_EXPERTS, TOP_K = 10, 3
needs_gpu = pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a GPU")


def residual_inputs(rows, width, dtype):
    """x, branch, its norm's weight, two next weights and the scale."""
    rng = np.random.default_rng(1)
    shapes = (*rows, width), (*rows, width), (width,), (width,), (width,), (1,)
    return [jnp.asarray(rng.standard_normal(shape), dtype) for shape in shapes]


def mixture_inputs(rows, width, dtype, undefined=np.nan, top_k=TOP_K):
    """x, dense, shares, chosen, three weights of norms inside, two next weights and the scale.

    One row has no experts and one only its middle one: shares of the others are `undefined`.
    """
    rng = np.random.default_rng(2)
    x, dense = rng.standard_normal((2, *rows, width))
    shares = rng.standard_normal((*rows, top_k, width)) * 3
    chosen = rng.integers(0, NUM_EXPERTS, (*rows, top_k))
    flat, flat_shares = chosen.reshape(-1, top_k), shares.reshape(-1, top_k, width)
    flat[-1], flat[0, ::2] = NUM_EXPERTS, NUM_EXPERTS
    flat_shares[flat == NUM_EXPERTS] = undefined
    weights = [*rng.standard_normal((5, width)), rng.standard_normal(1)]
    x, dense, *weights = (jnp.asarray(array, dtype) for array in (x, dense, *weights))
    return [x, dense, jnp.asarray(shares, jnp.float32), jnp.asarray(chosen, jnp.int32), *weights]


def residual(impl, scaled=True):
    """The public function of the arrays alone."""

    def call(*arrays):
        *arrays, scale = arrays
        return kernels.residual_norm(*arrays, scale=scale if scaled else None, eps=EPS, impl=impl)

    return jax.jit(call)


def mixture(impl, scaled=True):
    """The public function of the arrays alone."""

    def call(*arrays):
        *arrays, scale = arrays
        scale = scale if scaled else None
        options = {"num_experts": NUM_EXPERTS, "eps": EPS, "impl": impl}
        return kernels.mixture_norm(*arrays, scale=scale, **options)

    return jax.jit(call)


def expected_sums(arrays, dtype, scaled):
    """The sum and its two norms, float64 rounded to `dtype` after each operation of plain JAX."""
    *arrays, scale = (np.asarray(array).astype(np.float64) for array in arrays)

    def rounded(array):
        return array.astype(dtype).astype(np.float64)

    def norm(array, weight):
        return rounded(array / np.sqrt((array**2).mean(-1, keepdims=True) + EPS) * weight)

    if len(arrays) == 5:
        x, branch, weight, *following = arrays
    else:
        x, dense, shares, chosen, dense_weight, shares_weight, weight, *following = arrays
        experts = rounded(np.where(chosen[..., None] < NUM_EXPERTS, shares, 0).sum(-2))
        branch = rounded(norm(dense, dense_weight) + norm(experts, shares_weight))
    y = rounded(x + norm(branch, weight))
    y = rounded(y * scale) if scaled else y
    return y, *(norm(y, each) for each in following)


KERNELS = {"residual": (residual, residual_inputs), "mixture": (mixture, mixture_inputs)}


def check(name, impl, dtype, tolerance, rows=(2, 3), width=160, scaled=True):
    """All results; they differ where a float32 sum falls on the other side of a rounding."""
    function, inputs = KERNELS[name]
    arrays = inputs(rows, width, dtype)
    results = function(impl, scaled)(*arrays)
    wanted = expected_sums(arrays, dtype, scaled)
    for got, want in zip(results, wanted, strict=True):
        assert got.dtype == dtype
        got = np.asarray(got).astype(np.float64)
        assert relative_error(got, want) <= tolerance
        if dtype == jnp.bfloat16:  # a rounding left out would turn a third of them
            assert (got != want).mean() < 0.01


@pytest.mark.parametrize("scaled", [True, False])
@pytest.mark.parametrize("impl", ["xla", "interpret"])
@pytest.mark.parametrize("name", KERNELS)
def test_the_sum_and_its_norms(name, impl, scaled):
    check(name, impl, np.float32, 1e-6, scaled=scaled)


def check_parts(impl, rows=(2, 3), width=160):
    """A branch in parts gives what their sum, rounded once, gives."""
    x, branch, *others = residual_inputs(rows, width, jnp.bfloat16)
    rng = np.random.default_rng(3)
    first, second = rng.standard_normal((2, *x.shape)).astype(np.float32)
    parts = np.stack([first, second, np.asarray(branch, np.float32)])
    summed = jnp.asarray((parts[0] + parts[1]) + parts[2], jnp.bfloat16)
    results = residual(impl)(x, jnp.asarray(parts), *others)
    for got, want in zip(results, residual(impl)(x, summed, *others), strict=True):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("impl", ["xla", "interpret"])
def test_a_branch_in_parts_is_their_sum(impl):
    check_parts(impl)


@pytest.mark.parametrize("name", KERNELS)
def test_bfloat16_rounds_where_the_plain_code_rounds(name):
    check(name, "interpret", jnp.bfloat16, 1e-3)


def test_shares_of_no_expert_are_not_looked_at():
    told = [
        mixture("interpret")(*mixture_inputs((2, 3), 160, jnp.bfloat16, undefined))
        for undefined in (np.nan, 1e30)
    ]
    for one, other in zip(*told, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("name", KERNELS)
def test_wide_rows_and_float32_are_refused_by_name(name):
    function, inputs = KERNELS[name]

    def refused(error, match, width, dtype, change=lambda arrays: arrays):
        with pytest.raises(error, match=f"{name}_norm.*{match}"):
            jax.eval_shape(function("triton"), *change(inputs((1,), width, dtype)))

    refused(NotImplementedError, "8193 numbers are more than 8192", 8193, jnp.bfloat16)
    refused(NotImplementedError, "float32: Triton takes bfloat16 only", 64, jnp.float32)
    # one weight of another width, then other rows beside x's
    refused(ValueError, "65", 64, jnp.bfloat16, lambda a: [*a[:-2], jnp.zeros(65), a[-1]])
    refused(
        ValueError, r"\(2, 64\)", 64, jnp.bfloat16, lambda a: [a[0], jnp.zeros((2, 64)), *a[2:]]
    )


@pytest.mark.parametrize(
    "device", ["NVIDIA H200", "NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-80GB"]
)
def test_both_lower_under_their_names(device):
    text = lower(residual("triton"), residual_inputs((1, 4), 5376, jnp.bfloat16), device)
    assert 'name = "carat_residual_norm"' in text
    arrays = mixture_inputs((1, 4), 2816, jnp.bfloat16, top_k=8)
    assert 'name = "carat_mixture_norm"' in lower(mixture("triton"), arrays, device)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("width", [160, 1024, 2816, 5376])
@pytest.mark.parametrize("name", KERNELS)
def test_triton_sums_and_norms(name, width):
    check(name, "triton", jnp.bfloat16, 2e-3, rows=(3, 4), width=width)


@pytest.mark.gpu
@needs_gpu
def test_triton_sums_a_branch_in_parts():
    check_parts("triton", rows=(3, 4), width=5376)
