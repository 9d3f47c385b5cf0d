"""What a step without its local layers' attention leaves out, and what it keeps."""

import jax.numpy as jnp
import numpy as np
import pytest

import carat_jax
from carat_jax.bench import command, ring_cost
from carat_jax.cache.append import Projection, append_attend
from carat_jax.model import self_attention


def test_only_local_attention_is_left_out(monkeypatch):
    qkv = jnp.arange(2 * 3 * 2 * 4 * 8, dtype=jnp.float32).reshape(2, 3, 2, 4, 8)
    new = Projection(qkv, 2, *[jnp.ones(8)] * 2, 1e-6, (jnp.ones((2, 3, 4)),) * 2)
    monkeypatch.setattr(ring_cost, "append_attend", lambda *args: args)
    at = jnp.zeros(2, jnp.int32), jnp.full(2, 3), None
    monkeypatch.setattr(ring_cost, "borrow_attend", lambda *args: args)
    with ring_cost.without_local_attention() as left_out:
        cache, out = self_attention.append_attend("ring", new, *at[:2], 4, at[2])
        whole = self_attention.append_attend("linear", new, *at[:2], None, at[2])
        borrowed = qkv[..., :2, :], None, 1e-6, (), at[0]
        alone = self_attention.borrow_attend("ring", *borrowed, 4, at[2])
        kept = self_attention.borrow_attend("linear", *borrowed, None, at[2])
    assert cache == "ring"
    assert len(left_out) == 2
    np.testing.assert_array_equal(alone, out)
    assert kept == ("linear", *borrowed, None, at[2])
    for head in range(4):
        np.testing.assert_array_equal(out[:, :, head], qkv[:, :, head // 2, head % 2])
    assert whole == ("linear", new, *at[:2], None, at[2])
    assert self_attention.append_attend is append_attend


@pytest.mark.parametrize(
    ("settings", "rows"),
    [({"attention": {"impl": "xla"}}, 1), ({"attention": {"impl": "interpret"}}, 17)],
)
def test_what_is_not_one_kernel_is_not_measured(settings, rows):
    engine = carat_jax.load(model="tiny", dtype="float32", **settings)
    with pytest.raises(ValueError, match=f"--rows: local layers do not attend to {rows} positions"):
        ring_cost.verify_steps(engine, [rows], 64, 1)


def test_a_context_that_does_not_fit_names_its_flag():
    engine = carat_jax.load(model="tiny", dtype="float32", engine={"max_context": 64})
    with pytest.raises(ValueError, match="--context: 4000 positions and room for 2048 more"):
        ring_cost.verify_steps(engine, [1], 4000, 1)


@pytest.mark.parametrize("texts", [["4", "0"], ["x"], ["-1"], []])
def test_counts_are_whole_numbers(texts):
    with pytest.raises(ValueError, match="--rows: "):
        command.whole_numbers("rows", texts)
    assert command.whole_numbers("rows", ["1", "16"]) == [1, 16]
