"""The activation of every gated product, inside kernels."""

import jax.numpy as jnp

_LOG2_E = 1.4426950408889634
_SCALE = 2 * (2 / jnp.pi) ** 0.5 * _LOG2_E


def gelu(x):
    """The tanh form of GELU, of float32: (1 + tanh(z)) / 2 is the logistic function of 2 z."""
    return x / (1 + jnp.exp2(-_SCALE * (x + 0.044715 * x * x * x)))
