"""What bfloat16 may and may not do: huge residuals stay finite, shapes move logits by rounding."""

import jax.numpy as jnp
import numpy as np
import pytest

from carat_jax.config import read_settings
from tests.oracle import top2_gap
from tests.toy_model import MAX_ROWS, build
from tests.toys import CONFIGS, make_ids, make_weights

RAW = CONFIGS["T4"]
# How far the shape of a step (rows, slots, prefill or decode) may move a bfloat16 logit here; a
# logit of 4 to 8 has an ulp of 0.03, and six layers round some twenty times each.
SPREAD = 0.25


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_residuals_beyond_the_range_of_float16_are_harmless(dtype):
    # given one channel of one layer's MLP output a few thousand times larger than the rest
    weights = make_weights(RAW)
    name = "layers.2.mlp.down_proj.weight"
    weights[name] = weights[name].copy()
    weights[name][5] *= 3000
    weights["layers.2.post_feedforward_layernorm.weight"] = weights[
        "layers.2.post_feedforward_layernorm.weight"
    ] * np.where(np.arange(RAW["hidden_size"]) == 5, 60_000, 1).astype(np.float32)
    model = build(RAW, weights, dtype)
    ids = make_ids(RAW, 20)
    want = model.reference.logits(ids)
    assert np.abs(model.reference.trace["layers.2"]).max() > 65504
    _, (got, *_) = model.feed(model.bank(1), [ids], 20)
    assert np.isfinite(got).all()
    np.testing.assert_allclose(got, want, atol=1e-4 if dtype == jnp.float32 else 0.5)


def test_float16_is_refused_by_name():
    with pytest.raises(ValueError, match=r"dtype: 'float16' is not one of bfloat16, float32"):
        read_settings(keywords={"dtype": "float16"})


@pytest.mark.parametrize(("dtype", "bound"), [(jnp.float32, 1e-4), (jnp.bfloat16, SPREAD)])
def test_the_shape_of_a_step_moves_logits_by_no_more_than_rounding(dtype, bound):
    model = build(RAW, make_weights(RAW, dtype=np.float32), dtype)
    ids, others = make_ids(RAW, 20), [make_ids(RAW, n, seed=3) for n in (7, 20)]
    told = []
    for num_slots in (1, 3):
        for chunk in (20, MAX_ROWS, 1):
            texts = [ids, *others][:num_slots]
            told.append(model.feed(model.bank(num_slots), texts, chunk)[1][0])
    spread = max(np.abs(logits - told[0]).max() for logits in told)
    assert spread < bound
    # and the choice is the same wherever the exact gap leaves no doubt
    exact = model.reference.logits(ids)
    certain = top2_gap(exact) > 2 * bound
    assert certain.any()
    for logits in told:
        np.testing.assert_array_equal(logits.argmax(-1)[certain], exact.argmax(-1)[certain])
