"""The benchmarks' baselines compute the same attention as the kernels' oracles."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from carat_jax.bench import baselines
from pallas_kernels import reference

STARTS = jnp.array([61, 130])
WINDOW, NEW = 48, 3


def _random(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape)


def _linear():
    return _random(0, 2, NEW, 4, 32), _random(1, 2, 2, 144, 32), _random(2, 2, 2, 144, 32)


@pytest.mark.parametrize("num_keys", [133, 144])
def test_three_stages_exact_and_padded_equal_the_oracle(num_keys):
    q, k, v = _linear()
    got = baselines.three_stage(q, k, v, STARTS, num_keys=num_keys)
    want = reference.grouped_attention(q, k, v, STARTS, STARTS + NEW)
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-5)


def test_a_full_cache_and_pages_equal_the_windowed_oracle():
    q, k, v = _linear()
    want = reference.grouped_attention(q, k, v, STARTS, STARTS + NEW, window=WINDOW)
    got = baselines.full(q, k, v, STARTS, window=WINDOW)
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-5)
    # given: the same keys in pages that lie in reverse order
    pages = 144 // baselines.PAGE
    tables = jnp.arange(2 * pages).reshape(2, pages)[:, ::-1]

    def pool(x):
        cut = x.reshape(2, 2, pages, baselines.PAGE, 32).transpose(0, 2, 3, 1, 4)
        return jnp.zeros((2 * pages, baselines.PAGE, 2, 32)).at[tables].set(cut)

    got = baselines.paged(q, pool(k), pool(v), tables, STARTS, window=WINDOW)
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-5)


def test_the_ring_in_plain_xla_equals_the_oracle():
    q, k, v = _random(0, 2, NEW, 4, 32), _random(1, 2, 2, 64, 32), _random(2, 2, 2, 64, 32)
    want = reference.ring_attention(q, k, v, STARTS, STARTS + NEW, window=WINDOW)
    got = baselines.ring_xla(q, k, v, STARTS, STARTS + NEW, window=WINDOW)
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-5)
