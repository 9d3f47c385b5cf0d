"""Norms, RoPE, embedding scale, soft cap and the visibility rule, against numpy."""

import jax.numpy as jnp
import numpy as np
import pytest
from ml_dtypes import bfloat16

from carat_jax.numerics.attention import KeyView, attend, visible
from carat_jax.numerics.layers import (
    embed,
    gelu_gate,
    linear,
    rms_norm,
    rope_frequencies,
    rope_tables,
    rotate,
    soft_cap,
    tied_head,
)
from tests.oracle import Reference, gelu_tanh
from tests.toys import CONFIGS


def normal(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


# Norms and products.


def test_rms_norm_multiplies_by_the_weight_as_it_is():
    x, weight = normal(0, 5, 16), np.linspace(0.5, 1.5, 16, dtype=np.float32)
    want = x / np.sqrt((x.astype(np.float64) ** 2).mean(-1, keepdims=True) + 1e-6) * weight
    np.testing.assert_allclose(rms_norm(jnp.asarray(x), jnp.asarray(weight)), want, atol=1e-6)
    np.testing.assert_allclose(rms_norm(jnp.asarray(x)), want / weight, atol=1e-6)


def test_rms_norm_puts_eps_inside_the_root():
    x = jnp.full((1, 4), 1e-3)
    np.testing.assert_allclose(rms_norm(x, eps=1e-6), 1e-3 / np.sqrt(2e-6), rtol=1e-6)


def test_rms_norm_in_bfloat16_rounds_once_from_float32():
    # given a row whose mean square bfloat16 sums cannot hold: one channel far above the rest
    x = normal(1, 3, 2048).astype(bfloat16)
    x[:, 7] = 300.0
    weight = (normal(2, 2048) * 0.1 + 1).astype(bfloat16)
    exact = x.astype(np.float64)
    exact = exact / np.sqrt((exact**2).mean(-1, keepdims=True) + 1e-6) * weight.astype(np.float64)
    got = np.asarray(rms_norm(jnp.asarray(x), jnp.asarray(weight)))
    # then at most a rare tie in the float32 arithmetic rounds to the other neighbour
    off = got != exact.astype(np.float32).astype(bfloat16)
    assert off.mean() < 1e-3
    np.testing.assert_allclose(got.astype(np.float64), exact, rtol=2**-8)


def test_linear_sums_over_the_leading_weight_axes():
    x, weight = normal(3, 2, 5, 3, 4), normal(4, 3, 4, 6, 7)
    want = np.einsum("btij,ijkl->btkl", x.astype(np.float64), weight)
    got = linear(jnp.asarray(x), jnp.asarray(weight), num_in=2)
    np.testing.assert_allclose(got, want, atol=1e-5)


def test_linear_refuses_a_weight_it_does_not_know():
    with pytest.raises(TypeError, match="str"):
        linear(jnp.ones((1, 2)), "int4")


def test_gelu_is_the_tanh_form():
    gate, up = normal(5, 3, 64) * 3, normal(6, 3, 64)
    want = gelu_tanh(gate.astype(np.float64)) * up
    np.testing.assert_allclose(gelu_gate(jnp.asarray(gate), jnp.asarray(up)), want, atol=2e-6)


def test_gelu_in_bfloat16_rounds_once():
    gate, up = (normal(seed, 1000).astype(bfloat16) for seed in (5, 6))
    exact = gelu_tanh(gate.astype(np.float64)) * up.astype(np.float64)
    got = np.asarray(gelu_gate(jnp.asarray(gate), jnp.asarray(up)))
    np.testing.assert_allclose(got.astype(np.float64), exact, rtol=2**-8, atol=1e-6)


# Embedding and head.


def test_embedding_scale_is_rounded_to_the_table_dtype_first():
    # sqrt(72) = 8.485 is 8.5 in bfloat16; the product is rounded once
    table = normal(6, 50, 72).astype(bfloat16)
    got = embed(jnp.arange(50)[None], jnp.asarray(table), 72**0.5)
    want = (table.astype(np.float32) * np.float32(8.5)).astype(bfloat16)
    np.testing.assert_array_equal(np.asarray(got[0]), want)
    # and in float32 it is the root to float32 precision, not to bfloat16's
    got = embed(jnp.arange(50)[None], jnp.asarray(table, jnp.float32), 72**0.5)
    np.testing.assert_array_equal(got[0], table.astype(np.float32) * np.float32(72**0.5))


@pytest.mark.parametrize(
    ("hidden", "scale"), [(1536, 39.25), (2560, 50.5), (3840, 62.0), (5376, 73.5)]
)
def test_embedding_scale_of_the_released_sizes(hidden, scale):
    table = jnp.ones((1, hidden), jnp.bfloat16)
    assert float(embed(jnp.zeros((1, 1), int), table, hidden**0.5)[0, 0, 0]) == scale


def test_head_is_float32_against_the_unscaled_table():
    hidden, table = normal(7, 1, 3, 64).astype(bfloat16), normal(8, 40, 64).astype(bfloat16)
    got = tied_head(jnp.asarray(hidden), jnp.asarray(table))
    assert got.dtype == jnp.float32
    want = hidden.astype(np.float64) @ table.astype(np.float64).T
    np.testing.assert_allclose(got, want, atol=1e-5)


def test_soft_cap_bounds_and_keeps_distinct_values_apart():
    x = np.linspace(-300, 300, 1001).astype(np.float32)
    got = np.asarray(soft_cap(jnp.asarray(x), 30.0))
    np.testing.assert_allclose(got, 30 * np.tanh(x.astype(np.float64) / 30), atol=1e-5)
    assert np.abs(got).max() <= 30
    np.testing.assert_array_equal(soft_cap(jnp.asarray(x), None), x)


# RoPE.


@pytest.mark.parametrize("is_sliding", [True, False])
@pytest.mark.parametrize("position", [0, 1, 7, 95])
def test_rotation_agrees_with_the_reference(is_sliding, position):
    reference = Reference(CONFIGS["T4"], {})
    width = 16 if is_sliding else 32
    x = normal(9, position + 1, 3, width)
    want = reference.rotate(x.astype(np.float64), is_sliding)[position]
    frequencies = rope_frequencies(16, 10_000.0) if is_sliding else rope_frequencies(32, 1e6, 0.25)
    tables = rope_tables(jnp.asarray([[position]]), frequencies)
    got = rotate(jnp.asarray(x[None, position:]), tables)[0, 0]
    np.testing.assert_allclose(got, want, atol=1e-5)


def test_proportional_frequencies_of_the_published_head():
    frequencies = rope_frequencies(512, 1e6, 0.25)
    assert frequencies.shape == (256,)
    assert np.flatnonzero(frequencies).tolist() == list(range(64))
    # the exponent's denominator is the head, 512, not the rotated 128
    np.testing.assert_allclose(frequencies[:64], 1e6 ** (-2 * np.arange(64) / 512), rtol=1e-6)
    assert abs(frequencies[63] - 1e6 ** (-2 * 63 / 128)) > 1e-2


def test_proportional_rope_leaves_the_other_dimensions_alone():
    x = normal(10, 1, 1, 2, 512)
    tables = rope_tables(jnp.asarray([[1234]]), rope_frequencies(512, 1e6, 0.25))
    moved = np.flatnonzero(np.asarray(rotate(jnp.asarray(x), tables) != x).any(axis=(0, 1, 2)))
    assert set(moved) <= {*range(64), *range(256, 320)}
    assert len(moved) == 128


def test_factor_divides_the_frequencies():
    np.testing.assert_allclose(
        rope_frequencies(32, 1e6, 0.25, 8.0), rope_frequencies(32, 1e6, 0.25) / 8, rtol=1e-6
    )


def test_angles_stay_exact_far_out():
    # float32 angles at position 250k: the error of the product, about 250k * 2**-24
    frequencies = rope_frequencies(256, 10_000.0)
    cos, sin = rope_tables(jnp.asarray([[250_000]]), frequencies)
    angles = 250_000 * 10_000.0 ** (-2 * np.arange(128) / 256)
    np.testing.assert_allclose(cos[0, 0], np.cos(angles), atol=0.04)
    np.testing.assert_allclose(sin[0, 0], np.sin(angles), atol=0.04)


def test_rotation_in_bfloat16_rounds_once():
    x = normal(11, 1, 4, 2, 32).astype(bfloat16)
    tables = rope_tables(jnp.arange(4)[None] + 77, rope_frequencies(32, 10_000.0))
    exact = rotate(jnp.asarray(x, jnp.float32), tables)
    got = rotate(jnp.asarray(x), tables)
    np.testing.assert_array_equal(np.asarray(got), np.asarray(exact).astype(bfloat16))


# Who sees whom.


@pytest.mark.parametrize("window", [1, 2, 8, None])
def test_window_counts_the_query_itself(window):
    query, key = np.arange(20)[None], np.arange(20)[None]
    got = np.asarray(visible(jnp.asarray(query), jnp.asarray(key), window))[0]
    for i in range(20):
        first = 0 if window is None else max(0, i - window + 1)
        assert np.flatnonzero(got[i]).tolist() == list(range(first, i + 1))


def test_entries_without_a_position_are_seen_by_nobody():
    got = visible(jnp.asarray([[0, 3]]), jnp.asarray([[-1, -8, 2, 0]]), 4)
    np.testing.assert_array_equal(got[0], [[False, False, False, True], [False, False, True, True]])


def _naive_attention(q, k, v, mask):
    """q [T, N, H], k and v [K, S, H], mask [T, S]; plain loops in float64."""
    out = np.zeros(q.shape)
    for t, n in np.ndindex(q.shape[:2]):
        head = n // (q.shape[1] // k.shape[0])
        keys = np.flatnonzero(mask[t])
        if not len(keys):
            continue
        scores = k[head, keys].astype(np.float64) @ q[t, n]
        weights = np.exp(scores - scores.max())
        out[t, n] = weights @ v[head, keys].astype(np.float64) / weights.sum()
    return out


@pytest.mark.parametrize("window", [5, None])
def test_attention_agrees_with_loops(window):
    # given shuffled keys, as a ring holds them, and a row that sees nothing
    rng = np.random.default_rng(12)
    q, k, v = normal(13, 2, 6, 4, 16), normal(14, 2, 2, 12, 16), normal(15, 2, 2, 12, 16)
    query_pos = np.stack([np.arange(6) + 9, np.arange(6) - 6 + 3])
    key_pos = np.stack([rng.permutation(12), np.where(np.arange(12) < 4, np.arange(12), -1)])
    view = KeyView(jnp.asarray(k), jnp.asarray(v), jnp.asarray(key_pos))
    got = attend(jnp.asarray(q), jnp.asarray(query_pos), view, window)
    for b in range(2):
        distance = query_pos[b][:, None] - key_pos[b][None]
        mask = (distance >= 0) & (key_pos[b] >= 0) & (distance < (window or 99))
        np.testing.assert_allclose(got[b], _naive_attention(q[b], k[b], v[b], mask), atol=2e-6)
    assert not np.asarray(got[1, :3]).any()


def test_attention_in_blocks_is_the_same(monkeypatch):
    q, k, v = normal(16, 2, 13, 4, 16), normal(17, 2, 2, 13, 16), normal(18, 2, 2, 13, 16)
    pos = jnp.broadcast_to(jnp.arange(13), (2, 13))
    view = KeyView(jnp.asarray(k), jnp.asarray(v), pos)
    whole = attend(jnp.asarray(q), pos, view, 5)
    monkeypatch.setattr("carat_jax.numerics.attention.MAX_SCORES", 2 * 4 * 13 * 5)
    np.testing.assert_allclose(attend(jnp.asarray(q), pos, view, 5), whole, atol=1e-6)


@pytest.mark.parametrize("junk", [np.nan, np.inf, 1e30])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_memory_behind_absent_entries_never_reaches_a_result(junk, dtype):
    q, k, v = normal(19, 1, 3, 4, 16), normal(20, 1, 2, 8, 16), normal(21, 1, 2, 8, 16)
    key_pos = jnp.asarray([[0, 1, 2, -1, 3, 4, -9, -1]])
    absent = np.asarray(key_pos[0] < 0)
    outputs = []
    for fill in (0.0, junk):
        k[:, :, absent], v[:, :, absent] = fill, fill
        view = KeyView(jnp.asarray(k, dtype), jnp.asarray(v, dtype), key_pos)
        query_pos = jnp.asarray([[2, 3, 4]])
        outputs.append(np.asarray(attend(jnp.asarray(q, dtype), query_pos, view, None)))
    assert np.isfinite(outputs[0]).all()
    np.testing.assert_array_equal(*outputs)


def test_a_zero_in_an_absent_entry_is_not_a_key_of_score_zero():
    # given real scores so low that a phantom key of score 0 would take all the weight
    k = np.tile(normal(22, 16), (1, 1, 6, 1)) + normal(23, 1, 1, 6, 16) * 0.01
    v, q = normal(24, 1, 1, 6, 16), -10 * k[:, :, :1]
    k[:, :, 3:], v[:, :, 3:] = 0, 0
    view = KeyView(jnp.asarray(k), jnp.asarray(v), jnp.asarray([[0, 1, 2, -1, -1, 9]]))
    got = attend(jnp.asarray(q), jnp.asarray([[2]]), view, 8)
    mask = np.array([[True, True, True, False, False, False]])
    want = _naive_attention(q[0], k[0], v[0], mask)
    assert (q[0, 0] @ k[0, 0, :3].T).max() < -50
    np.testing.assert_allclose(got[0], want, atol=1e-5)
