"""The router's choices and weights, and every form of the experts' products, on values.

A norm follows the experts' sum, so a factor that is wrong for all experts alike hardly moves a
logit: weights and sums are checked here, before that norm.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ml_dtypes import bfloat16

from carat_jax.families import from_hf
from carat_jax.model.decoder_layer import DecoderLayer
from carat_jax.model.moe import Router
from carat_jax.model.params import merge, split
from carat_jax.model.self_attention import Attention
from carat_jax.model.step_context import StepContext
from carat_jax.model.taps import NO_TAPS
from carat_jax.numerics.experts import expert_mlp
from carat_jax.numerics.options import PLAIN, ComputeOptions
from tests.oracle import Reference, gelu_tanh
from tests.toy_model import build, place_all, toy
from tests.toys import CONFIGS, make_ids

RAW = CONFIGS["26b"]
FORMS = ("dense", "ragged_dot", "interpret")


def router(dtype=jnp.float32, **changed):
    """The router of layer 0 with some of its weights replaced, and the reference with the same."""
    model = toy("26b")
    weights = {n: np.asarray(w, np.float32) for n, w in model.reference.weights.items()}
    weights |= {f"layers.0.router.{name}": value for name, value in changed.items()}
    weights = {name: w.astype(jnp.dtype(dtype)) for name, w in weights.items()}
    graph, specs = split(Router(model.config, 0, dtype))
    own = {name: w for name, w in weights.items() if name.startswith("layers.0.router.")}
    return merge(graph, place_all(specs, own)), Reference(RAW, weights)


def shares(weights, chosen):
    """Weights [B, T, k] of `chosen` experts as [T, E]."""
    dense = np.zeros((weights.shape[1], RAW["num_experts"]), np.float32)
    np.put_along_axis(dense, np.asarray(chosen)[0], np.asarray(weights)[0], axis=-1)
    return dense


@pytest.mark.parametrize("impl", ["dense", "interpret"])
@pytest.mark.parametrize("dtype", [np.float32, bfloat16])
def test_router_weights_are_float32_exact_in_either_dtype(dtype, impl):
    # given a residual of the model's type
    x = np.random.default_rng(0).normal(size=(1, 50, RAW["hidden_size"])).astype(dtype)
    x[..., 3] *= 6
    made, reference = router(dtype)
    weights, chosen = made(jnp.asarray(x), impl)
    # then choice and weight are those of float64, though the residual was rounded to bfloat16
    reference.mixture(x[0].astype(np.float64), 0)
    assert reference.router_gap() > 1e-5
    np.testing.assert_allclose(
        shares(weights, chosen), reference.trace["layers.0.shares"], atol=2e-6
    )
    assert weights.dtype == jnp.float32


def test_weights_sum_to_one_before_the_scale_of_each_expert():
    ones = np.ones(RAW["num_experts"])
    x = jnp.asarray(np.random.default_rng(1).normal(size=(1, 20, RAW["hidden_size"])), jnp.float32)
    plain, chosen = router(per_expert_scale=ones)[0](x)
    np.testing.assert_allclose(plain.sum(-1), 1, atol=1e-6)
    assert (np.diff(plain, axis=-1) <= 0).all()
    # when each expert has a scale of its own, one of them zero
    scale = np.linspace(0, 3, RAW["num_experts"])
    weights, again = router(per_expert_scale=scale)[0](x)
    np.testing.assert_array_equal(again, chosen)
    np.testing.assert_allclose(weights, np.asarray(plain) * scale[np.asarray(chosen)], atol=1e-6)


@pytest.mark.parametrize("impl", ["dense", "interpret"])
def test_of_equal_scores_the_lower_ids_are_chosen(impl):
    count, width = RAW["num_experts"], RAW["hidden_size"]
    row = np.random.default_rng(2).normal(size=width)
    proj = np.tile(row, (count, 1))
    proj[7] *= 0.5
    x = jnp.asarray(np.random.default_rng(3).normal(size=(1, 30, width)), jnp.float32)
    weights, chosen = router(**{"proj.weight": proj, "per_expert_scale": np.ones(count)})[0](
        x, impl
    )
    # given scores that are all equal but expert 7's, which is nearer to zero
    is_positive = np.asarray(weights)[0].std(-1) < 1e-6
    assert 0 < is_positive.sum() < 30
    np.testing.assert_array_equal(
        np.asarray(chosen)[0][is_positive], [[0, 1, 2]] * is_positive.sum()
    )
    np.testing.assert_array_equal(
        np.asarray(chosen)[0][~is_positive][:, :3], [[7, 0, 1]] * (~is_positive).sum()
    )


def problem(num_rows, num_experts=10, top_k=3, seed=0):
    """Tokens, weights, choices (all different in a row) and the experts' matrices, float32."""
    rng, hidden, width = np.random.default_rng(seed), 64, 16
    chosen = np.array([rng.permutation(num_experts)[:top_k] for _ in range(num_rows)])
    return [
        rng.normal(size=(num_rows, hidden)).astype(np.float32),
        rng.uniform(0.1, 1, (num_rows, top_k)).astype(np.float32),
        chosen.astype(np.int32),
        (rng.normal(size=(num_experts, 2, width, hidden)) / 8).astype(np.float32),
        (rng.normal(size=(num_experts, hidden, width)) / 4).astype(np.float32),
    ]


def exact(x, weights, chosen, gate_up, down):
    """Token by token in float64; choices past the last expert add nothing."""
    out = np.zeros(x.shape)
    for row, k in np.ndindex(chosen.shape):
        if (expert := chosen[row, k]) < len(gate_up):
            gate, up = (matrix.astype(np.float64) @ x[row] for matrix in gate_up[expert])
            out[row] += weights[row, k] * (down[expert].astype(np.float64) @ (gelu_tanh(gate) * up))
    return out


@pytest.mark.parametrize("impl", FORMS)
@pytest.mark.parametrize("num_rows", [1, 5, 70])
def test_every_form_computes_the_same_sum(impl, num_rows):
    arrays = problem(num_rows)
    arrays[2][num_rows // 2, 1:] = 10  # one choice only
    arrays[2][-1] = np.where(num_rows > 1, 10, arrays[2][-1])  # no choice at all
    arrays[0][-1] = np.where(num_rows > 1, np.nan, arrays[0][-1])  # whatever it holds
    got = np.asarray(expert_mlp(*map(jnp.asarray, arrays), impl))
    np.testing.assert_allclose(got, exact(*arrays), atol=1e-5)
    if num_rows > 1:
        assert not got[-1].any()


@pytest.mark.parametrize("impl", FORMS)
def test_bfloat16_is_rounded_as_little_as_it_can_be(impl):
    arrays = problem(20)
    for i in (0, 3, 4):
        arrays[i] = arrays[i].astype(bfloat16)
    got = np.asarray(expert_mlp(*map(jnp.asarray, arrays), impl)).astype(np.float64)
    want = exact(*[a.astype(np.float32) if i in (0, 3, 4) else a for i, a in enumerate(arrays)])
    assert np.linalg.norm(got - want) <= 5e-3 * np.linalg.norm(want)


def test_an_unknown_form_is_refused():
    with pytest.raises(ValueError, match="impl='cuda'"):
        expert_mlp(*map(jnp.asarray, problem(2)), "cuda")


def test_rows_without_a_token_disturb_nobody_and_choose_nobody():
    # given a chunk of 7 tokens in 16 rows, then the same with other ids behind them
    model, ids = toy("26b"), make_ids(RAW, 7)
    told = []
    for filling in (7, 200):
        tokens = np.array([[*ids, *[filling] * 9]], np.int32)
        _, _, logits = model.steps.verify(model.params, model.bank(1), tokens, np.array([7]))
        told.append(np.asarray(logits)[0])
    np.testing.assert_array_equal(told[0][:7], told[1][:7])
    np.testing.assert_allclose(told[0][:7], model.reference.logits(ids), atol=1e-4)


@pytest.mark.parametrize("impl", ["ragged_dot", "interpret"])
def test_a_model_computes_the_same_logits_by_every_form(impl):
    kinds = ["sliding_attention", "full_attention"]
    made = build(
        RAW | {"num_hidden_layers": 2, "layer_types": kinds},
        compute=dataclasses.replace(PLAIN, experts=impl),
    )
    ids = make_ids(RAW, 20)
    _, (got,) = made.feed(made.bank(1), [ids], 20)
    np.testing.assert_allclose(got, made.reference.logits(ids), atol=1e-4)


def test_kernels_between_the_products_change_no_bit_of_a_layer(monkeypatch):
    # given two slots of four rows, some without a token, and attention that passes rows on
    monkeypatch.setattr(Attention, "__call__", lambda self, normed, step: normed)
    rng, num_valid = np.random.default_rng(4), jnp.array([4, 1])
    graph, specs = split(DecoderLayer(from_hf(RAW), 0, bfloat16))
    params = jax.tree.map(lambda s: jnp.asarray(rng.normal(size=s.shape) / 3, bfloat16), specs)
    x = jnp.asarray(rng.normal(size=(2, 4, RAW["hidden_size"])), bfloat16)

    # where no rounding is left out of what the compiler fuses
    @functools.partial(
        jax.jit, static_argnums=0, compiler_options={"xla_allow_excess_precision": False}
    )
    def run(options):
        step = StepContext(
            starts=jnp.zeros(2, jnp.int32), num_valid=num_valid, slots=None, options=options,
            positions=jnp.zeros((2, 4), jnp.int32), rope={}, caches={}, views={}, taps=NO_TAPS,
        )  # fmt: skip
        layer = merge(graph, params)
        return layer(x, layer.input_layernorm(x), None, step, layer.input_layernorm)

    fused, plain = (run(ComputeOptions(impl, experts="interpret")) for impl in ("interpret", "xla"))
    for got, want in zip(fused, plain, strict=True):
        got, want = (np.asarray(out).astype(np.float32) for out in (got, want))
        np.testing.assert_array_equal(got, want)
        assert np.abs(got - np.asarray(x).astype(np.float32)).mean() > 0.1
