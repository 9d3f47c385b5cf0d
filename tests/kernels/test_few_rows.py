"""Products of few rows: the kernel against float64, whatever the rows, the splits and the shape.

On a CPU small weights run through the Pallas interpreter; with CARAT_TEST_GPU those of the models
run through Triton.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from carat_jax.numerics.layers import linear
from pallas_kernels import few_row_parts, few_row_product, tiles
from pallas_kernels.tiles import ProductTile
from tests.kernels.bodies import relative_error
from tests.kernels.lowering import lower

ON_GPU = jax.default_backend() == "gpu"
IMPL = "triton" if ON_GPU else "interpret"
SMALL = (96, 48), (384, 1280), (2048, 256)
# 31B: q, k and v of a local and of a global layer, o of both, down; E4B: o.
LARGE = (5376, 16384), (5376, 18432), (8192, 5376), (16384, 5376), (21504, 5376), (2048, 2560)
PRODUCT = functools.partial(few_row_product, impl=IMPL)


@functools.cache
def factors(shape, dtype=jnp.bfloat16):
    """Rows [32, K] and a weight [K, N]."""
    inputs, outputs = shape
    keys = jax.random.split(jax.random.key(inputs))
    x = jax.random.normal(keys[0], (tiles.MAX_FEW_ROWS, inputs), dtype)
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
        tile = tiles.few_row_tile(rows=rows, inputs=shape[0], outputs=shape[1], device=device)
        assert tile.shared_memory(1) <= tiles.limits(device)[0]


@pytest.mark.parametrize(
    ("products", "rows", "shape", "has_kernel"),
    [
        ("measured", 32, (5376, 16384), True),
        ("measured", 33, (5376, 16384), False),
        ("measured", 1, (21504, 5376), True),
        ("measured", 32, (5376, 43008), False),  # XLA's is the faster
        ("measured", 4, (2048, 2560), False),
        ("measured", 8, (1024, 16384), False),  # an assistant's gate and up
        ("measured", 1, (2560, 20480), False),  # E4B's: 160 tiles for 132 multiprocessors
        ("measured", 1, (3840, 30720), True),  # 12B's: 240 tiles for 264
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
