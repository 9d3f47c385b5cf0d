"""What a step without its local layers' attention leaves out, and what it keeps."""

import jax.numpy as jnp
import numpy as np
import pytest

import carat_jax
from carat_jax.bench import ring_cost
from carat_jax.cache.append import Projection, append_attend
from carat_jax.model import decoder_layer


def test_only_local_attention_is_left_out(monkeypatch):
    qkv = jnp.arange(2 * 3 * 2 * 4 * 8, dtype=jnp.float32).reshape(2, 3, 2, 4, 8)
    new = Projection(qkv, 2, *[jnp.ones(8)] * 2, 1e-6, (jnp.ones((2, 3, 4)),) * 2)
    monkeypatch.setattr(ring_cost, "append_attend", lambda *args: args)
    at = jnp.zeros(2, jnp.int32), jnp.full(2, 3), None
    with ring_cost.without_local_attention():
        cache, out = decoder_layer.append_attend("ring", new, *at[:2], 4, at[2])
        whole = decoder_layer.append_attend("linear", new, *at[:2], None, at[2])
    assert cache == "ring"
    for head in range(4):
        np.testing.assert_array_equal(out[:, :, head], qkv[:, :, head // 2, head % 2])
    assert whole == ("linear", new, *at[:2], None, at[2])
    assert decoder_layer.append_attend is append_attend


def test_plain_steps_are_refused():
    engine = carat_jax.load(model="tiny", dtype="float32", attention={"impl": "xla"})
    with pytest.raises(ValueError, match="fuse_rows must be on"):
        ring_cost.verify_steps(engine, [1], 64, 1)
