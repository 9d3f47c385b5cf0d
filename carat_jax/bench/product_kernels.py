"""Products of few rows in `bench.kernels`: the kernel against XLA's own choice, on 31B weights."""

import functools

import jax.numpy as jnp

from carat_jax.bench.kernel_race import checked_race, random_array
from carat_jax.numerics.layers import linear
from pallas_kernels import few_row_product, reference

# Inputs and outputs of a local layer's products.
SHAPES = {
    "qkv": (5376, 16384),
    "o": (8192, 5376),
    "gate_up": (5376, 43008),
    "down": (21504, 5376),
}
# Two weights of each kind are many times the card's cache.
_COPIES = 2


def _rows_again(product, x, weight):
    """The product, of the width of `x` again, so that products form a chain."""
    return jnp.resize(product(x, weight), x.shape)


def products(records, ceiling, num_rows):
    """Every product of `num_rows` rows; each includes making its result the rows of the next."""
    for name, (inputs, outputs) in SHAPES.items():
        x = random_array(99, (num_rows, inputs))
        layers = [(random_array(i, (inputs, outputs), inputs**-0.5),) for i in range(_COPIES)]

        variants = {
            "triton": (functools.partial(_rows_again, few_row_product), "weights"),
            "xla": (functools.partial(_rows_again, linear), "weights"),
        }
        checked_race(
            records,
            {"case": "products", "product": name, "rows": num_rows},
            variants,
            _rows_again(reference.few_row_product, x, *layers[0]),
            x,
            {"weights": layers},
            moved=dict.fromkeys(variants, 2 * inputs * outputs),
            ceiling=ceiling,
            length=8,
        )
