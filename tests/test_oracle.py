"""The numpy reference against transformers, and proof that the toys show every rule it states."""

import numpy as np
import pytest
from ml_dtypes import bfloat16

from tests.oracle import Reference, log_softmax, top2_gap
from tests.toys import CONFIGS, SIZES, make_ids, make_weights, write_checkpoint

LENGTH = 80  # five windows of 16, ten of 8


class NormPlusOne(Reference):
    def rms_norm(self, x, weight=None):
        return super().rms_norm(x, None if weight is None else weight + 1.0)


class ValueAfterKeyNormAndRope(Reference):
    def values(self, raw_key, raw_value, key):
        return self.rms_norm(key) if raw_value is None else super().values(raw_key, raw_value, key)


class ValueWithoutNorm(Reference):
    def values(self, raw_key, raw_value, key):
        return raw_key if raw_value is None else raw_value


class RotatesEveryPair(Reference):
    def inv_freq(self, head_dim, is_sliding):
        rope = self.config["rope_parameters"]["full_attention"]
        if is_sliding:
            return super().inv_freq(head_dim, is_sliding)
        return rope["rope_theta"] ** (-2.0 * np.arange(head_dim // 2) / head_dim)


class ExponentOverRotatedShare(Reference):
    def inv_freq(self, head_dim, is_sliding):
        if is_sliding:
            return super().inv_freq(head_dim, is_sliding)
        freq, live = super().inv_freq(head_dim, is_sliding), head_dim // 8
        theta = self.config["rope_parameters"]["full_attention"]["rope_theta"]
        freq[:live] = theta ** (-2.0 * np.arange(live) / (2 * live))
        return freq


class InterleavedPairs(Reference):
    def rotate(self, x, is_sliding):
        order = np.arange(x.shape[-1]).reshape(2, -1).T.ravel()  # pairs (i, i + 1)
        rotated = np.empty_like(x)
        rotated[..., order] = super().rotate(x[..., order], is_sliding)
        return rotated


class NoSoftcap(Reference):
    def softcap(self, logits):
        return logits


class LayerScalarOnBranchOnly(Reference):
    def layer(self, x, layer, per_layer):
        scale = self.tensor(layer, "layer_scalar")
        return x + (super().layer(x, layer, per_layer) / scale - x) * scale


class BorrowsFromFirstOwner(Reference):
    def kv_owner(self, layer):
        if layer < self.num_own_layers:
            return layer
        kind = self.is_sliding(layer)
        return min(i for i in range(self.num_own_layers) if self.is_sliding(i) == kind)


class ScoresOverSqrtDim(Reference):
    def rotate(self, x, is_sliding):
        return super().rotate(x, is_sliding) / x.shape[-1] ** 0.25  # once in q, once in k


class WindowShort(Reference):
    slack = -1

    def visible(self, length, is_sliding):
        distance = np.arange(length)[:, None] - np.arange(length)[None, :]
        window = self.config["sliding_window"] + self.slack if is_sliding else length
        return (distance >= 0) & (distance < window)


class WindowLong(WindowShort):
    slack = 1


class RouterSeesTheMlpsInput(Reference):
    def router_input(self, residual, layer):
        normed = self.rms_norm(residual, self.tensor(layer, "pre_feedforward_layernorm.weight"))
        return super().router_input(normed, layer)


class RouterWithoutScale(Reference):
    def router_input(self, residual, layer):
        return super().router_input(residual, layer) / self.tensor(layer, "router.scale")


class OneExpertFewer(Reference):
    def chosen(self, probs):
        shares = super().chosen(probs)
        least = np.where(shares > 0, shares, np.inf).min(-1, keepdims=True)
        return np.where(shares > least, shares, 0)


class UpBeforeGate(Reference):
    def tensor(self, layer, name):
        tensor = super().tensor(layer, name)
        if name != "experts.gate_up_proj":
            return tensor
        return np.roll(tensor, tensor.shape[1] // 2, axis=1)


class WithoutPerExpertScale(Reference):
    def chosen(self, probs):
        return super().chosen(probs) / self.tensor(0, "router.per_expert_scale")


MISTAKES = {
    "T4": (
        NormPlusOne,
        ValueAfterKeyNormAndRope,
        ValueWithoutNorm,
        RotatesEveryPair,
        ExponentOverRotatedShare,
        InterleavedPairs,
        NoSoftcap,
        LayerScalarOnBranchOnly,
        ScoresOverSqrtDim,
        WindowShort,
        WindowLong,
    ),
    "T4e": (NormPlusOne, LayerScalarOnBranchOnly, WindowShort, WindowLong),
    "e2b": (BorrowsFromFirstOwner, RotatesEveryPair, WindowShort, WindowLong),
    "26b": (
        RouterSeesTheMlpsInput,
        RouterWithoutScale,
        OneExpertFewer,
        WithoutPerExpertScale,
        UpBeforeGate,
    ),
}
PAIRS = [(name, mistake) for name, mistakes in MISTAKES.items() for mistake in mistakes]


def toy(name):
    config = CONFIGS[name]
    return config, make_weights(config), make_ids(config, LENGTH)


@pytest.mark.parametrize(("name", "mistake"), PAIRS)
def test_toys_show_the_mistake(name, mistake):
    config, weights, ids = toy(name)
    right = Reference(config, weights).logits(ids)
    assert np.abs(mistake(config, weights).logits(ids) - right).max() > 1e-2


def test_sum_of_probabilities_and_gap():
    config, weights, ids = toy("T4")
    logits = Reference(config, weights).logits(ids)
    np.testing.assert_allclose(np.exp(log_softmax(logits)).sum(-1), 1.0, atol=1e-12)
    best = logits.argmax(-1)
    rest = logits.copy()
    rest[np.arange(len(rest)), best] = -np.inf
    np.testing.assert_array_equal(top2_gap(logits), logits.max(-1) - rest.max(-1))


def test_a_key_outside_every_window_of_a_sliding_layer_is_not_seen():
    # given a model of sliding layers whose windows reach back 2 * (W - 1) positions at most
    config = CONFIGS["T4"] | {"num_hidden_layers": 2, "layer_types": ["sliding_attention"] * 2}
    weights, ids = make_weights(config), make_ids(config, 40)
    changed = [2, 111 if ids[1] != 111 else 112, *ids[2:]]
    # when the token at position 1 changes
    one, two = (Reference(config, weights).logits(x) for x in (ids, changed))
    # then the last position that moves is 1 + 2 * (W - 1)
    moved = np.flatnonzero(np.abs(one - two).max(axis=-1) > 1e-9)
    assert moved.tolist() == list(range(1, 1 + 2 * (config["sliding_window"] - 1) + 1))


@pytest.fixture(scope="module")
def torch_model():
    return pytest.importorskip("tests.torch_model")


@pytest.mark.parity
@pytest.mark.parametrize("form", ["nested", "flat", "resaved", "resaved_flat"])
@pytest.mark.parametrize("name", CONFIGS)
def test_reference_agrees_with_transformers(torch_model, tmp_path, name, form):
    config, weights, ids = toy(name)
    write_checkpoint(tmp_path, config, weights, form=form, num_shards=3 if form == "resaved" else 1)
    got = torch_model.logits(torch_model.load(tmp_path), ids)
    want = Reference(config, weights).logits(ids)
    assert np.abs(got - want).max() < 5e-5


@pytest.mark.parity
@pytest.mark.parametrize("name", MISTAKES)
def test_transformers_does_not_share_a_mistake(torch_model, tmp_path, name):
    config, weights, ids = toy(name)
    write_checkpoint(tmp_path, config, weights)
    got = torch_model.logits(torch_model.load(tmp_path), ids)
    for mistake in MISTAKES[name]:
        assert np.abs(got - mistake(config, weights).logits(ids)).max() > 1e-2, mistake.__name__


@pytest.mark.parity
@pytest.mark.parametrize("name", ["T4", "T4e", *SIZES])
def test_transformers_with_its_cache_writes_the_reference_text(torch_model, tmp_path, name):
    config, weights, _ = toy(name)
    ids = make_ids(config, 5)
    want, gap = Reference(config, weights).greedy(ids, 40)
    assert gap > 1e-3
    write_checkpoint(tmp_path, config, weights)
    assert torch_model.greedy(torch_model.load(tmp_path), ids, 40) == want


@pytest.mark.parity
def test_router_weights_and_the_experts_sum_agree_with_transformers(torch_model, tmp_path):
    # A norm follows the experts' sum, so the logits hardly see a wrong factor: compare it here.
    config, weights, ids = toy("26b")
    write_checkpoint(tmp_path, config, weights)
    model, seen = torch_model.text_model(torch_model.load(tmp_path)), []
    for layer in model.layers:
        layer.router.register_forward_hook(lambda _, inputs, out: seen.append(out[1:]))
        layer.experts.register_forward_hook(lambda _, inputs, out: seen.append(out))
    with torch_model.torch.no_grad():
        model(torch_model.torch.tensor([ids]))
    reference = Reference(config, weights)
    reference.hidden(ids)
    assert reference.router_gap() > 5e-5
    for layer, ((shares, chosen), mixed) in enumerate(zip(seen[::2], seen[1::2], strict=True)):
        want = reference.trace[f"layers.{layer}.shares"]
        assert (np.sort(chosen, -1) == np.nonzero(want)[1].reshape(chosen.shape)).all()
        np.testing.assert_allclose(shares, np.take_along_axis(want, chosen.numpy(), -1), atol=1e-5)
        np.testing.assert_allclose(mixed, reference.trace[f"layers.{layer}.mixture"], atol=1e-4)


@pytest.mark.parity
def test_per_layer_inputs_agree_with_transformers(torch_model, tmp_path):
    # A norm follows where they enter, so the logits hardly see a wrong constant: compare them here.
    config, weights, ids = toy("e4b")
    write_checkpoint(tmp_path, config, weights)
    model = torch_model.text_model(torch_model.load(tmp_path))
    token_ids = torch_model.torch.tensor([ids])
    embedded = model.embed_tokens(token_ids)
    got = model.project_per_layer_inputs(embedded, model.get_per_layer_inputs(token_ids, embedded))
    reference = Reference(config, weights)
    reference.hidden(ids)
    np.testing.assert_allclose(embedded[0].detach(), reference.trace["embed"], atol=1e-5)
    np.testing.assert_allclose(got[0].detach(), reference.trace["ple"], atol=1e-5)


@pytest.mark.parity
def test_transformers_rounds_the_embedding_scale_to_the_weights_dtype(torch_model, tmp_path):
    config = CONFIGS["T4"] | {"hidden_size": 72}
    weights, ids = make_weights(config, dtype=bfloat16), make_ids(config, 30)
    write_checkpoint(tmp_path, config, weights)
    model = torch_model.text_model(torch_model.load(tmp_path, "bfloat16"))
    got = model.embed_tokens(torch_model.torch.tensor(ids)).detach().float().numpy()
    scale = np.float32(bfloat16(72**0.5))
    rows = weights["embed_tokens.weight"][ids].astype(np.float32)
    np.testing.assert_array_equal(got, (rows * scale).astype(bfloat16).astype(np.float32))
    assert scale == 8.5
