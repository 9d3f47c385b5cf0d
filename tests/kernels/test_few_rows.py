"""Products of few rows: the kernel against float64, whatever the rows, the splits and the shape.

On a CPU small weights run through the Pallas interpreter; with CARAT_TEST_GPU those of the models
run through Triton.
"""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from carat_jax.numerics.layers import linear
from pallas_kernels import few_row_parts, few_row_product, gated_row_parts, tiles
from pallas_kernels.product_tiles import MAX_FEW_ROWS, ProductTile, few_row_tile
from tests.kernels.bodies import relative_error
from tests.kernels.lowering import lower
from tests.oracle import gelu_tanh

ON_GPU = jax.default_backend() == "gpu"
IMPL = "triton" if ON_GPU else "interpret"
SMALL = (96, 48), (384, 1280), (2048, 256)
# 31B: q, k and v of a local and of a global layer, o of both, down; E4B: o.
LARGE = (5376, 16384), (5376, 18432), (8192, 5376), (16384, 5376), (21504, 5376), (2048, 2560)
GATED_ROWS = (1, 1), (1, 4), (3, 1), (8, 1), (17, 1), (8, 4)
PRODUCT = functools.partial(few_row_product, impl=IMPL)


@functools.cache
def factors(shape, dtype=jnp.bfloat16):
    """Rows [32, K] and a weight [K, N]."""
    inputs, outputs = shape
    keys = jax.random.split(jax.random.key(inputs))
    x = jax.random.normal(keys[0], (MAX_FEW_ROWS, inputs), dtype)
    weight = jax.random.normal(keys[1], (inputs, outputs), dtype) * inputs**-0.5
    return x, weight.astype(dtype)


@functools.cache
def exact(shape, dtype=jnp.bfloat16):
    """The product in float64."""
    x, weight = (np.asarray(array).astype(np.float64) for array in factors(shape, dtype))
    return x @ weight


@pytest.mark.gpu
@pytest.mark.parametrize("shape", LARGE if ON_GPU else SMALL)
def test_the_product_and_its_parts(shape):
    x, weight = factors(shape)
    for rows in (1, 4, 17, 32):
        product = PRODUCT(x[:rows], weight)
        assert product.dtype == x.dtype
        assert relative_error(np.asarray(product), exact(shape)[:rows]) <= 2e-3
        parts = np.asarray(few_row_parts(x[:rows], weight, impl=IMPL))
        assert (parts.dtype == np.float32) == (len(parts) > 1)
        np.testing.assert_array_equal(functools.reduce(np.add, parts).astype(x.dtype), product)


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="the interpreter's products of other sizes sum otherwise")
@pytest.mark.parametrize("shape", LARGE)
def test_a_row_does_not_depend_on_its_neighbours(shape):
    x, weight = factors(shape)
    every = np.asarray(PRODUCT(x, weight))
    for rows in (1, 2, 4, 8, 16, 17, 31):
        np.testing.assert_array_equal(PRODUCT(x[:rows], weight), every[:rows])


@pytest.mark.parametrize("splits", [1, 2, 3, 5])
def test_every_split_takes_its_share(splits):
    x, weight = factors((384, 1280), jnp.float32)
    tile = ProductTile(rows=32, columns=64, block=64, warps=4, stages=2, splits=splits)
    parts = few_row_parts(x, weight, impl="interpret", tile=tile)
    assert len(parts) == splits
    block_of_input = np.arange(384) // 64  # 6 blocks: 5 splits have unequal shares
    for split, part in enumerate(parts):
        share = block_of_input % splits == split
        x64, weight64 = (np.asarray(array, np.float64) for array in (x[:, share], weight[share]))
        assert relative_error(np.asarray(part), x64 @ weight64) < 1e-6


def test_rows_of_several_axes_keep_them():
    x, weight = factors((96, 48))
    product = few_row_product(x.reshape(2, 4, 4, 96), weight, impl="interpret")
    wanted = few_row_product(x, weight, impl="interpret").reshape(2, 4, 4, 48)
    np.testing.assert_array_equal(product, wanted)


def gated_factors(rows, shape, splits, dtype=jnp.bfloat16):
    """Parts of the gate, what it gates in five layers, and a weight."""
    keys = jax.random.split(jax.random.key(shape[0]), 3)
    gates = jax.random.normal(keys[0], (splits, *rows, shape[0]))  # from far below zero to above
    ups = jax.random.normal(keys[1], (*rows, 5, shape[0]), dtype)
    weight = jax.random.normal(keys[2], shape) * shape[0] ** -0.5
    return gates, ups, weight.astype(dtype)


def exactly_gated(gates, ups, layer, weight):
    """In float64, the gate and what it gates rounded as they are where plain JAX writes them."""
    dtype = ups.dtype
    gates, ups, weight = (np.asarray(array).astype(np.float64) for array in (gates, ups, weight))
    gate = gates.sum(0).astype(dtype).astype(np.float64)
    return (gelu_tanh(gate) * ups[..., layer, :]).astype(dtype).astype(np.float64) @ weight


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("rows", "shape", "splits"),
    itertools.product(GATED_ROWS, [(256, 1536), (256, 2560)], [6, 8])
    if ON_GPU
    else [((1, 1), (48, 96), 8), ((3, 1), (256, 64), 6), ((8, 4), (48, 96), 6)],
)
def test_rows_are_gated_in_the_layer_that_is_told(rows, shape, splits):
    gates, ups, weight = gated_factors(rows, shape, splits)
    parts = np.asarray(gated_row_parts(gates, ups, 4, weight, impl=IMPL))
    assert parts.shape[1:] == (*rows, shape[1])
    got = parts.astype(np.float32).sum(0)
    assert relative_error(got, exactly_gated(gates, ups, 4, weight)) <= 5e-3


def test_float32_is_not_rounded_on_the_way():
    gates, ups, weight = gated_factors((3, 2), (48, 96), 3, jnp.float32)
    got = np.asarray(gated_row_parts(gates, ups, 2, weight, impl="interpret")).sum(0)
    assert relative_error(got, exactly_gated(gates, ups, 2, weight)) <= 1e-5


def test_a_traced_layer_costs_no_further_program():
    gates, ups, weight = gated_factors((4,), (48, 96), 2)
    run = jax.jit(functools.partial(gated_row_parts, impl="interpret"))
    for layer in range(5):
        got = np.asarray(run(gates, ups, jnp.int32(layer), weight)).astype(np.float32).sum(0)
        assert relative_error(got, exactly_gated(gates, ups, layer, weight)) <= 5e-3
    assert run._cache_size() == 1


def test_what_it_cannot_take_is_refused_by_name():
    def refused(error, match, rows, shape, dtype=jnp.bfloat16, impl="triton"):
        arrays = jnp.zeros((rows, 96), dtype), jnp.zeros(shape, dtype)
        with pytest.raises(error, match=f"few_row_product.*{match}"):
            jax.eval_shape(functools.partial(few_row_product, impl=impl), *arrays)

    refused(NotImplementedError, "33 rows are more than 32", 33, (96, 48))
    refused(NotImplementedError, r"\(96, 40\) are not multiples of 16", 1, (96, 40))
    refused(NotImplementedError, "float32 weight: Triton takes bfloat16", 1, (96, 48), jnp.float32)
    refused(ValueError, r"\(1, 96\) do not fit a weight \(64, 48\)", 1, (64, 48))
    refused(ValueError, "impl='cuda' is not one of", 1, (96, 48), impl="cuda")


def test_gated_rows_that_do_not_match_are_refused():
    def refused(error, match, gates, ups, weight, impl="triton"):
        given = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in (gates, ups, weight)]
        call = functools.partial(gated_row_parts, impl=impl)
        with pytest.raises(error, match=f"gated_row_parts.*{match}"):
            jax.eval_shape(lambda gates, ups, weight: call(gates, ups, 0, weight), *given)

    refused(ValueError, r"\(2, 4, 48\).* do not match", (2, 4, 48), (3, 5, 48), (48, 96))
    refused(ValueError, r"\(4, 5, 32\).* do not match", (2, 4, 48), (4, 5, 32), (48, 96))
    refused(ValueError, r"\(64, 96\) do not match", (2, 4, 48), (4, 5, 48), (64, 96))
    fitting = (2, 33, 48), (33, 5, 48), (48, 96)
    refused(NotImplementedError, "33 rows are more than 32", *fitting)
    refused(ValueError, "impl='cuda' is not one of", *fitting, impl="cuda")


@pytest.mark.parametrize(
    ("changed", "told"),
    [({"block": 64}, "divide 96 inputs"), ({"columns": 32}, "48 outputs"), ({"rows": 2}, "4 rows")],
)
def test_a_tile_that_does_not_fit_is_refused(changed, told):
    fitting = ProductTile(rows=16, columns=16, block=32, warps=4, stages=2)
    x, weight = factors((96, 48))
    run = functools.partial(few_row_product, x[:4], weight, impl="interpret")
    np.testing.assert_array_equal(run(tile=fitting), run())
    with pytest.raises(ValueError, match=f"few_row_product.*{told}"):
        run(tile=dataclasses.replace(fitting, **changed))


@pytest.mark.parametrize("device", ["NVIDIA H200", "NVIDIA A100-SXM4-80GB"])
@pytest.mark.parametrize("shape", LARGE)
def test_it_lowers_under_its_name_and_in_its_memory(device, shape):
    for rows in (1, 32):
        arrays = [jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((rows, shape[0]), shape)]
        text = lower(functools.partial(few_row_product, impl="triton"), arrays, device)
        assert 'name = "carat_few_rows"' in text
        tile = few_row_tile(rows=rows, inputs=shape[0], outputs=shape[1], device=device)
        assert tile.shared_memory(1) <= tiles.limits(device)[0]


@pytest.mark.parametrize("device", ["NVIDIA H200", "NVIDIA A100-SXM4-80GB"])
@pytest.mark.parametrize("width", [1536, 2560])
def test_a_per_layer_input_lowers_under_its_name_in_one_walk(device, width):
    def run(gates, ups, weight):
        return gated_row_parts(gates, ups, 3, weight, impl="triton")

    for rows in (1, 32):
        sizes = ((8, rows, 256), jnp.float32), ((rows, 5, 256), jnp.bfloat16)
        weight = jax.ShapeDtypeStruct((256, width), jnp.bfloat16)
        arrays = [*(jax.ShapeDtypeStruct(*size) for size in sizes), weight]
        text = lower(run, arrays, device)
        assert 'name = "carat_gated_rows"' in text
        # A pipeline of loads would hold every part of every row in shared memory.
        tile = few_row_tile(rows=rows, inputs=256, outputs=width, device=device)
        assert tile.stages == 1
        assert few_row_tile(rows=rows, inputs=width, outputs=256, device=device).splits == 8


@pytest.mark.parametrize(
    ("products", "rows", "shape", "has_kernel"),
    [
        ("measured", 32, (5376, 16384), True),
        ("measured", 33, (5376, 16384), False),
        ("measured", 1, (21504, 5376), True),
        ("measured", 32, (5376, 43008), False),  # XLA's is the faster
        ("measured", 4, (2048, 2560), False),
        ("measured", 8, (1024, 16384), False),  # an assistant's gate and up
        ("measured", 4, (5376, 18432), True),  # q, k and v of a global layer of the 31B
        ("measured", 1, (2560, 20480), False),  # E4B's gate and up
        ("measured", 1, (3840, 30720), False),  # 12B's
        ("measured", 4, (3840, 10240), False),  # q, k and v of a global layer of it
        ("measured", 32, (15360, 3840), True),  # and its down
        ("triton", 4, (2048, 2560), True),
        ("triton", 33, (2048, 2560), False),
        ("xla", 32, (5376, 16384), False),
    ],
)
def test_who_multiplies_in_a_layer(products, rows, shape, has_kernel):
    arrays = [jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((1, rows, shape[0]), shape)]
    text = lower(functools.partial(linear, products=products), arrays, "NVIDIA H200")
    assert ("carat_few_rows" in text) == has_kernel


@pytest.mark.parametrize(
    ("shape", "device"), [((5376, 16384), "NVIDIA L4"), ((8192, 4104), "NVIDIA H200")]
)
def test_what_has_no_tile_is_multiplied_by_xla_unless_the_kernel_is_named(shape, device):
    arrays = [jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((1, 4, shape[0]), shape)]
    assert "carat" not in lower(functools.partial(linear, products="measured"), arrays, device)
    with pytest.raises(NotImplementedError):
        lower(functools.partial(linear, products="triton"), arrays, device)
