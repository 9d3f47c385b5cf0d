"""The gate of a per-layer input: the kernel against float64 that rounds where plain JAX does.

On a GPU the same tests run the widths of E2B and E4B through Triton.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import per_layer_gate, tiles
from pallas_kernels.tiles import ProductTile
from tests.kernels.bodies import relative_error
from tests.kernels.lowering import lower

ON_GPU = jax.default_backend() == "gpu"
GATE = functools.partial(per_layer_gate, impl="triton" if ON_GPU else "interpret")
RELEASED = (1536, 256), (2560, 256)  # E2B, E4B
NUM_LAYERS = 5


def arrays(shape, rows, dtype=jnp.bfloat16):
    """x, gate, the inputs of five layers; values of the gate from far below to far above zero."""
    width, gated = shape
    keys = jax.random.split(jax.random.key(width), 3)
    x = 3 * jax.random.normal(keys[0], (*rows, width))
    gate = jax.random.normal(keys[1], shape) * width**-0.5
    inputs = jax.random.normal(keys[2], (*rows, NUM_LAYERS, gated))
    return [array.astype(dtype) for array in (x, gate, inputs)]


def exact(x, gate, inputs, layer):
    """In float64, the product rounded as it is where plain JAX writes it."""
    dtype = x.dtype
    x, gate, inputs = (np.asarray(array).astype(np.float64) for array in (x, gate, inputs))
    z = (x @ gate).astype(dtype).astype(np.float64)
    gelu = z / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (z + 0.044715 * z**3)))
    return gelu * inputs[..., layer, :]


@pytest.mark.gpu
@pytest.mark.parametrize("shape", RELEASED if ON_GPU else [(96, 48), (512, 32)])
@pytest.mark.parametrize("rows", [(1, 1), (1, 4), (17, 1), (8, 4)])
def test_it_gates_the_inputs_of_the_layer_it_is_told(shape, rows):
    given = arrays(shape, rows)
    for layer in (0, 3, NUM_LAYERS - 1):
        gated = GATE(*given, layer)
        assert gated.dtype == jnp.bfloat16
        assert gated.shape == (*rows, shape[1])
        assert relative_error(np.asarray(gated), exact(*given, layer)) <= 5e-3


def test_float32_is_not_rounded_on_the_way():
    given = arrays((96, 48), (3, 2), jnp.float32)
    gated = per_layer_gate(*given, 2, impl="interpret")
    assert relative_error(np.asarray(gated), exact(*given, 2)) <= 1e-5


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="the interpreter's products of other sizes sum otherwise")
@pytest.mark.parametrize("shape", RELEASED)
def test_a_row_does_not_depend_on_its_neighbours(shape):
    x, gate, inputs = arrays(shape, (32,))
    every = np.asarray(GATE(x, gate, inputs, 1))
    for rows in (1, 4, 16, 17, 31):
        np.testing.assert_array_equal(GATE(x[:rows], gate, inputs[:rows], 1), every[:rows])


def test_the_layer_may_be_traced_and_costs_no_further_program():
    given = arrays((96, 48), (4,))
    gate = jax.jit(functools.partial(per_layer_gate, impl="interpret"))
    results = [np.asarray(gate(*given, jnp.int32(layer))) for layer in range(NUM_LAYERS)]
    assert gate._cache_size() == 1
    for layer, result in enumerate(results):
        assert relative_error(result, exact(*given, layer)) <= 5e-3


def test_what_it_cannot_take_is_refused_by_name():
    def refused(error, match, x, gate, inputs, dtype=jnp.bfloat16, impl="triton", **more):
        given = [jax.ShapeDtypeStruct(shape, dtype) for shape in (x, gate, inputs)]
        call = functools.partial(per_layer_gate, layer=0, impl=impl, **more)
        with pytest.raises(error, match=f"per_layer_gate.*{match}"):
            jax.eval_shape(call, *given)

    refused(ValueError, r"x \(1, 64\), gate \(96, 48\)", (1, 64), (96, 48), (1, 5, 48))
    refused(ValueError, r"inputs \(1, 5, 32\)", (1, 96), (96, 48), (1, 5, 32))
    refused(ValueError, r"inputs \(1, 48\)", (1, 96), (96, 48), (1, 48))
    refused(ValueError, r"are not of rows \(2,\)", (2, 96), (96, 48), (1, 5, 48))
    refused(NotImplementedError, "33 rows are more than 32", (33, 96), (96, 48), (33, 5, 48))
    refused(NotImplementedError, r"\(96, 40\) are not multiples", (1, 96), (96, 40), (1, 5, 40))
    float32 = (1, 96), (96, 48), (1, 5, 48), jnp.float32
    refused(NotImplementedError, "float32 weight: Triton takes bfloat16", *float32)
    refused(ValueError, "impl='cuda' is not one of", *float32[:3], impl="cuda")
    tile = ProductTile(rows=16, columns=32, block=32, warps=4, stages=1)
    refused(ValueError, "does not divide", *float32[:3], impl="interpret", tile=tile)


@pytest.mark.parametrize("device", ["NVIDIA H200", "NVIDIA A100-SXM4-80GB"])
@pytest.mark.parametrize("shape", RELEASED)
def test_it_lowers_under_its_name_and_in_its_memory(device, shape):
    for rows in (1, 32):
        sizes = (rows, shape[0]), shape, (rows, NUM_LAYERS, shape[1])
        given = [jax.ShapeDtypeStruct(size, jnp.bfloat16) for size in sizes]
        text = lower(functools.partial(per_layer_gate, layer=2, impl="triton"), given, device)
        assert "carat_per_layer_gate" in text
        tile = tiles.per_layer_tile(rows=rows, inputs=shape[0], outputs=shape[1], device=device)
        assert tile.rows >= rows
        assert tile.shared_memory(1) <= tiles.limits(device)[0]
