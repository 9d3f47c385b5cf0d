"""The MTP assistant against an independent numpy drafter over the reference's keys and values.

Slots of unequal lengths draft together, so that each comparison also says that a neighbour changes
nothing. The mistakes at the top are what public engines got wrong; each must be visible here.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from carat_jax.assistant_families import ASSISTANTS, assistant_from_hf
from carat_jax.cache.bank import PLAIN, CacheKinds, empty_bank
from carat_jax.families import FAMILIES, from_hf
from carat_jax.model.assistant import Assistant, draft, load_assistant, target_views
from carat_jax.model.gemma4 import Gemma4
from carat_jax.model.params import merge, random_params, split
from tests.assistant_oracle import ReferenceAssistant
from tests.assistant_toys import (
    assistant_config,
    assistant_shapes,
    assistant_weights,
    write_assistant,
)
from tests.oracle import Reference, top2_gap
from tests.toy_model import MAX_ROWS, place_all, poison, toy
from tests.toys import CONFIGS, make_ids, make_weights

W = 8
NUM_SLOTS = 5
F32 = jnp.dtype("float32")
LENGTHS = (3, W, W + 1, 20, 40)  # of keys: before, at and past the window, turns of the ring
NUM_STEPS = 4


def place(specs: dict, weights: dict) -> dict:
    """The parameters for `specs`; ids apart, because they have no NaN to be found missing by."""
    named = {name: weights[name] for name in weights if not name.endswith("token_ordering")}
    named = {
        name.removeprefix("model.") if name.startswith("model.") else f"/{name}": tensor
        for name, tensor in named.items()
    }
    if "masked_embedding" not in specs:
        return place_all(specs, named)
    head = dict(specs["masked_embedding"])
    del head["token_ordering"]
    params = place_all({**specs, "masked_embedding": head}, named)
    ids = jnp.asarray(weights["masked_embedding.token_ordering"], jnp.int32)
    params["masked_embedding"]["token_ordering"] = ids
    return params


@dataclasses.dataclass(frozen=True)
class Pair:
    """A toy target, an assistant for it, and the numpy drafter that judges both."""

    target_name: str
    raw: dict
    weights: dict
    params: dict
    reference: ReferenceAssistant

    @property
    def target(self):
        return toy(self.target_name)

    def prefill(self, texts, cache: CacheKinds = PLAIN):
        """A bank that holds `texts`, and the last state of each (slots without a text: nothing)."""
        texts = [*texts, *[[]] * (NUM_SLOTS - len(texts))]
        bank = empty_bank(self.target.config, NUM_SLOTS, 64, MAX_ROWS, F32, cache)
        last = np.zeros((NUM_SLOTS, self.target.config.hidden_size), np.float32)
        for first in range(0, max(map(len, texts)), MAX_ROWS):
            bank, hidden = self.extend(bank, [ids[first : first + MAX_ROWS] for ids in texts])
            for slot, ids in enumerate(texts):
                if first < len(ids) <= first + MAX_ROWS:
                    last[slot] = hidden[slot, len(ids) - first - 1]
        return bank, last

    def extend(self, bank, blocks):
        """The bank with up to `MAX_ROWS` ids added to each slot, and their states."""
        tokens = np.array([[*ids, *[7] * (MAX_ROWS - len(ids))] for ids in blocks], np.int32)
        num_valid = np.array([len(ids) for ids in blocks], np.int32)
        step = extend_step(self.target_name)
        bank, hidden = step(self.target.params["target"], bank, tokens, num_valid)
        return bank, np.asarray(hidden)

    def draft(self, bank, tokens, hidden, bias=0.0):
        """A burst after the bonus `tokens`."""
        tokens = np.array([*tokens, *[0] * (NUM_SLOTS - len(tokens))], np.int32)
        bias = np.broadcast_to(np.float32(bias), (NUM_SLOTS, 320))
        burst = burst_step(self.target_name, self.raw["use_ordered_embeddings"])
        return burst(self.target.params["target"], self.params, bank, tokens, hidden, bias)

    def burst_after(self, keys, bonus, cache: CacheKinds = PLAIN, bias=0.0):
        """A burst of slots that hold `keys`."""
        bank, hidden = self.prefill(keys, cache)
        return self.draft(bank, bonus, hidden, bias)

    def check(self, burst, texts, bias=None):
        """Every step of every slot equals the numpy drafter's."""
        for row, ids in enumerate(texts):
            steps = self.reference.burst(ids, NUM_STEPS, None if bias is None else bias[row])
            want = np.array([step.logits for step in steps])
            chosen_from = want if bias is None else want + bias[row]
            assert top2_gap(chosen_from).min() > 1e-3
            np.testing.assert_allclose(burst.logits[row], want, atol=1e-4)
            assert burst.tokens[row].tolist() == [step.token for step in steps]


@functools.cache
def extend_step(target_name):
    """The compiled step of a target over all slots."""
    graph, _ = split(Gemma4(toy(target_name).config, F32))

    def extend(params, bank, tokens, num_valid):
        return merge(graph, params)(tokens, bank, num_valid)[::-1]

    return jax.jit(extend)


@functools.cache
def burst_step(target_name, centroids):
    """The compiled burst of an assistant with either head."""
    config = toy(target_name).config
    raw = assistant_config(CONFIGS[target_name], centroids=centroids)
    target_graph, _ = split(Gemma4(config, F32))
    graph, _ = split(Assistant(assistant_from_hf(raw), config, F32))

    def burst(target_params, params, bank, tokens, hidden, bias):
        target, assistant = merge(target_graph, target_params), merge(graph, params)
        views = target_views(target, bank)
        return draft(assistant, target, views, tokens, hidden, bank.lengths, NUM_STEPS, bias)

    return jax.jit(burst)


@functools.cache
def pair(target_name: str = "T4", ordering: str = "") -> Pair:
    """An assistant with the dense head, or with clusters in "random" or "identity" order."""
    target = toy(target_name)
    raw = assistant_config(CONFIGS[target_name], centroids=bool(ordering))
    weights = assistant_weights(raw, ordering=ordering or "random")
    _, specs = split(Assistant(assistant_from_hf(raw), target.config, F32))
    reference = ReferenceAssistant(raw, weights, target.reference)
    return Pair(target_name, raw, weights, place(specs, weights), reference)


def texts_of(lengths, seed=5) -> list[list[int]]:
    """Texts whose last token, the bonus, comes after `lengths` keys."""
    return [make_ids(CONFIGS["T4"], n + 1, seed) for n in lengths]


def split_bonus(texts):
    return [ids[:-1] for ids in texts], [ids[-1] for ids in texts]


# Draft logits.


@pytest.mark.parametrize(
    ("target_name", "ordering"),
    [("T4", ""), ("T4e", ""), ("T4", "random"), ("T4", "identity")],
)
def test_every_step_of_a_burst_equals_the_numpy_drafter(target_name, ordering):
    drafter = pair(target_name, ordering)
    texts = texts_of(LENGTHS)
    keys, bonus = split_bonus(texts)
    drafter.check(drafter.burst_after(keys, bonus), texts)


@pytest.mark.parametrize("target_name", ["T4", "T4e"])
@pytest.mark.parametrize("length", [4, W - 1, W, W + 1, 29])
def test_a_burst_after_a_verified_block_sees_only_the_accepted_rows(target_name, length):
    # given a block of five rows per slot, of which 1 to 5 are kept and the rest were wrong
    drafter = pair(target_name)
    texts = [make_ids(CONFIGS["T4"], length + kept + 1, seed=kept) for kept in range(1, 6)]
    bank, _ = drafter.prefill([ids[:length] for ids in texts])
    blocks = [ids[length:-1] + [300] * (MAX_ROWS - kept) for kept, ids in enumerate(texts, 1)]
    bank, _ = drafter.extend(bank, blocks)
    ends = jnp.asarray([len(ids) - 1 for ids in texts], jnp.int32)
    bank = dataclasses.replace(bank, lengths=ends)
    hidden = np.array([drafter.target.reference.hidden(ids[:-1])[-1] for ids in texts], np.float32)
    drafter.check(drafter.draft(bank, [ids[-1] for ids in texts], hidden), texts)


def test_values_that_carry_keys_give_the_same_drafts():
    drafter = pair()
    texts = texts_of(LENGTHS)
    keys, bonus = split_bonus(texts)
    drafter.check(drafter.burst_after(keys, bonus, CacheKinds(global_layers="v_rot")), texts)


@pytest.mark.parametrize("ordering", ["", "random"])
def test_a_slot_drafts_with_others_what_it_drafts_alone(ordering):
    drafter = pair("T4", ordering)
    keys, bonus = split_bonus(texts_of(LENGTHS))
    together = drafter.burst_after(keys, bonus)
    for slot in (0, 3):
        alone = drafter.burst_after([keys[slot]], [bonus[slot]])
        np.testing.assert_array_equal(together.tokens[slot], alone.tokens[0])
        np.testing.assert_array_equal(together.logits[slot], alone.logits[0])


def test_unused_memory_never_reaches_a_draft():
    drafter = pair()
    keys, bonus = split_bonus(texts_of((1, 7, 40)))
    bank, hidden = drafter.prefill(keys)
    clean = drafter.draft(bank, bonus, hidden)
    poisoned = drafter.draft(poison(bank, np.nan), bonus, hidden)
    np.testing.assert_array_equal(clean.logits, poisoned.logits)


def test_an_idle_slot_gives_no_nan():
    drafter = pair()
    keys, bonus = split_bonus(texts_of((5,)))
    assert np.isfinite(drafter.burst_after([[], *keys], [0, *bonus]).logits).all()


# The choice.


@pytest.mark.parametrize("ordering", ["", "random"])
def test_suppressed_tokens_are_never_drafted(ordering):
    # given the five best tokens of every slot's first step forbidden to that slot, others pushed
    drafter = pair("T4", ordering)
    texts = texts_of(LENGTHS)
    keys, bonus = split_bonus(texts)
    bias = np.random.default_rng(1).normal(0, 0.5, (len(texts), 320)).astype(np.float32)
    for row, ids in enumerate(texts):
        best = np.argsort(drafter.reference.burst(ids, 1)[0].logits)[-5:]
        bias[row, best] = -np.inf
    burst = drafter.burst_after(keys, bonus, bias=bias)
    drafter.check(burst, texts, bias)
    chosen = np.take_along_axis(bias, np.asarray(burst.tokens), axis=1)
    assert np.isfinite(chosen).all()


def test_the_dense_head_of_a_centroid_assistant_finds_what_clusters_hide():
    drafter = pair("T4", "random")
    logits = drafter.reference.burst(texts_of((20,))[0], 1)[0].logits
    assert np.isfinite(logits).sum() == 3 * 320 // 20
    identity = pair("T4", "identity").reference.burst(texts_of((20,))[0], 1)[0].logits
    assert set(np.flatnonzero(np.isfinite(identity))) != set(np.flatnonzero(np.isfinite(logits)))


# The mistakes that these comparisons would catch.


class WindowShorter(ReferenceAssistant):
    def num_visible(self, num_keys, is_sliding):
        return super().num_visible(num_keys, is_sliding) - (is_sliding and num_keys > W)


class WindowLonger(ReferenceAssistant):
    def num_visible(self, num_keys, is_sliding):
        return super().num_visible(num_keys, is_sliding) + (is_sliding and num_keys > W + 1)


class MovesOnEachStep(ReferenceAssistant):
    def position(self, num_keys, step):
        return num_keys + step


class StandsOnTheLastKey(ReferenceAssistant):
    def position(self, num_keys, step):
        return num_keys - 1


class ReadsTheFirstOwner(ReferenceAssistant):
    def owner(self, is_sliding):
        return min(i for i in range(6) if self.target.is_sliding(i) == is_sliding)


class RawEmbedding(ReferenceAssistant):
    def embedding(self, token):
        return super().embedding(token) / self.target.embed_scale


class ScaledTwice(ReferenceAssistant):
    def embedding(self, token):
        return super().embedding(token) * self.target.embed_scale


class StateFirst(ReferenceAssistant):
    def join(self, embedding, state):
        return super().join(state, embedding)


class FeedsBackBeforeNorm(ReferenceAssistant):
    def fed_back(self, before_norm, normed):
        return super().fed_back(normed, before_norm)


class SoftCaps(ReferenceAssistant):
    def scores(self, normed):
        return 30 * np.tanh(super().scores(normed) / 30)


class ClustersInFileOrder(ReferenceAssistant):
    def scores(self, normed):
        order = self.weights["masked_embedding.token_ordering"]
        self.weights["masked_embedding.token_ordering"] = np.arange(len(order))
        logits = super().scores(normed)
        self.weights["masked_embedding.token_ordering"] = order
        return logits


@pytest.mark.parametrize(
    ("mistake", "num_keys", "ordering"),
    [
        (WindowShorter, 20, ""),
        (WindowLonger, 20, ""),
        (MovesOnEachStep, 8, ""),
        (StandsOnTheLastKey, 8, ""),
        (ReadsTheFirstOwner, 8, ""),
        (RawEmbedding, 8, ""),
        (ScaledTwice, 8, ""),
        (StateFirst, 8, ""),
        (FeedsBackBeforeNorm, 8, ""),
        (SoftCaps, 8, ""),
        (ClustersInFileOrder, 8, "random"),
    ],
)
def test_toys_show_the_mistake(mistake, num_keys, ordering):
    drafter = pair("T4", ordering)
    ids = texts_of((num_keys,))[0]
    right = drafter.reference.burst(ids, 2)[1].logits
    wrong = mistake(drafter.raw, drafter.weights, drafter.target.reference).burst(ids, 2)[1].logits
    differs = np.isfinite(right) != np.isfinite(wrong)
    both = np.isfinite(right) & np.isfinite(wrong)
    assert differs.any() or np.abs(right[both] - wrong[both]).max() > 1e-2


# Sizes, and what does not fit.


@pytest.mark.parametrize(
    ("name", "num_params", "num_tensors"),
    [
        ("e2b", 77_993_476, 50),
        ("e4b", 78_779_908, 50),
        ("12b", 422_856_964, 48),
        ("26b-a4b", 419_711_236, 48),
        ("31b", 469_518_596, 48),
    ],
)
def test_published_assistants_have_their_published_size(name, num_params, num_tensors):
    specs = split(Assistant(ASSISTANTS[name], FAMILIES[name], jnp.dtype("bfloat16")))[1]
    leaves = jax.tree.leaves(specs)
    assert sum(math.prod(spec.shape) for spec in leaves) == num_params
    assert sum(len(spec.tensors) for spec in leaves) == num_tensors


@pytest.mark.parametrize(
    ("change", "numbers"),
    [
        ({"hidden_size": 72}, ("backbone_hidden_size=64", "hidden_size=72")),
        ({"vocab_size": 321}, ("vocab_size=320", "vocab_size=321")),
        ({"sliding_window": 16}, ("sliding_window=8", "sliding_window=16")),
        ({"head_dim": 32}, ("head dimension of local layers=16", "32")),
        ({"global_head_dim": 64}, ("head dimension of global layers=32", "64")),
        ({"num_key_value_heads": 4}, ("KV heads of local layers=2", "4")),
        ({"num_global_key_value_heads": 2}, ("KV heads of global layers=1", "2")),
    ],
)
def test_an_assistant_that_does_not_fit_is_refused_with_both_numbers(change, numbers):
    config = assistant_from_hf(assistant_config(CONFIGS["T4"]))
    target = from_hf(CONFIGS["T4"] | change)
    with pytest.raises(ValueError, match="does not fit") as refusal:
        Assistant(config, target, F32)
    for number in numbers:
        assert number in str(refusal.value)


@pytest.mark.parametrize(
    ("top", "text", "message"),
    [
        ({"num_centroids": 19}, {}, "vocab_size=320 is not a multiple of num_centroids=19"),
        ({"centroid_intermediate_top_k": 21}, {}, "top_k=21 is not between 1 and num_centroids=20"),
        ({"num_centroids": None}, {}, "missing num_centroids"),
        ({"backbone_hidden_size": None}, {}, "missing backbone_hidden_size"),
        ({"model_type": "gemma4"}, {}, "model_type='gemma4' is not an assistant"),
        ({}, {"num_kv_shared_layers": 2}, "num_kv_shared_layers=2 of 4"),
        (
            {},
            {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 320},
            "hidden_size_per_layer_input=8",
        ),
        ({}, {"use_double_wide_mlp": True}, "use_double_wide_mlp=True"),
    ],
)
def test_a_config_that_is_no_assistant_is_refused(top, text, message):
    raw = assistant_config(CONFIGS["T4"], centroids=True) | top
    raw["text_config"] = raw["text_config"] | text
    with pytest.raises(ValueError, match=message):
        assistant_from_hf(raw)


def test_random_weights_know_every_token():
    config = assistant_from_hf(assistant_config(CONFIGS["T4"], centroids=True))
    specs = split(Assistant(config, toy("T4").config, F32))[1]
    ids = random_params(specs["masked_embedding"], seed=0)["token_ordering"]
    assert ids.dtype == jnp.int32
    assert ids.tolist() == list(range(320))


# Files.


@pytest.mark.parametrize("ordering", ["", "random"])
def test_a_published_folder_loads_bit_for_bit(tmp_path, ordering):
    drafter = pair("T4", ordering)
    write_assistant(tmp_path, drafter.raw, drafter.weights)
    _, params = load_assistant(tmp_path, drafter.target.config, F32)
    jax.tree.map(np.testing.assert_array_equal, params, drafter.params)


def test_faults_of_a_folder_are_named(tmp_path):
    drafter = pair("T4", "random")
    target, dtype = drafter.target.config, F32
    with pytest.raises(ValueError, match=r"no config\.json"):
        load_assistant(tmp_path, target, dtype)
    ids = drafter.weights["masked_embedding.token_ordering"].copy()
    ids[7] = ids[8]
    name = "masked_embedding.token_ordering"
    write_assistant(tmp_path, drafter.raw, drafter.weights | {name: ids})
    with pytest.raises(ValueError, match="holds 319 of the 320 token ids"):
        load_assistant(tmp_path, target, dtype)
    write_assistant(tmp_path, drafter.raw, drafter.weights | {name: ids.astype(np.float32)})
    with pytest.raises(ValueError, match=name):
        load_assistant(tmp_path, target, dtype)
    norm = {"model.norm.weight": np.ones(32, np.int64)}
    write_assistant(tmp_path, drafter.raw, drafter.weights | norm)
    with pytest.raises(ValueError, match=r"model\.norm\.weight"):
        load_assistant(tmp_path, target, dtype)
    rest = {k: v for k, v in drafter.weights.items() if k != "pre_projection.weight"}
    write_assistant(tmp_path, drafter.raw, rest | {"model.pre_projection.weight": np.zeros(3)})
    with pytest.raises(ValueError, match="problems") as refusal:
        load_assistant(tmp_path, target, dtype)
    assert "missing tensors: pre_projection.weight" in str(refusal.value)
    assert "unknown text tensors: model.pre_projection.weight" in str(refusal.value)
    with pytest.raises(ValueError, match="backbone_hidden_size=64, but hidden_size=72"):
        load_assistant(tmp_path, dataclasses.replace(target, hidden_size=72), dtype)


# transformers.


@pytest.mark.parity
@pytest.mark.parametrize(
    ("target_name", "ordering"), [("T4", ""), ("T4e", ""), ("T4", "random"), ("12b", "")]
)
def test_the_numpy_drafter_is_what_transformers_computes(tmp_path, target_name, ordering):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    raw = assistant_config(CONFIGS[target_name], centroids=bool(ordering))
    weights = assistant_weights(raw)
    target = Reference(CONFIGS[target_name], make_weights(CONFIGS[target_name]))
    write_assistant(tmp_path, raw, weights)
    model, report = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, output_loading_info=True
    )
    assert not any(report.values()), report
    reference = ReferenceAssistant(raw, weights, target)
    num_rows = 0
    for num_keys in (3, W, 3 * W, 40):
        ids = make_ids(CONFIGS[target_name], num_keys + 1)
        for got, want in zip(
            _transformers_burst(torch, model.eval(), reference, ids),
            reference.burst(ids, NUM_STEPS),
            strict=True,
        ):
            seen = np.isfinite(want.logits)
            np.testing.assert_allclose(got[seen], want.logits[seen], atol=1e-4)
            assert got.argmax() == want.token
            num_rows += 1
    assert num_rows == 4 * NUM_STEPS


def _transformers_burst(torch, model, reference, ids):
    """Logits of each step, by the module itself over the reference's keys, values and state."""
    target = reference.target
    state, token, num_keys = target.hidden(ids[:-1])[-1], ids[-1], len(ids) - 1
    shared = {}
    for kind, is_sliding in (("sliding_attention", True), ("full_attention", False)):
        owner = reference.owner(is_sliding)
        rows = (target.trace[f"layers.{owner}.{part}"].swapaxes(0, 1)[None] for part in "kv")
        shared[kind] = tuple(torch.tensor(part, dtype=torch.float32) for part in rows)
    for _ in range(NUM_STEPS):
        joined = np.concatenate([reference.embedding(token), state])[None, None]
        with torch.no_grad():
            output = model(
                inputs_embeds=torch.tensor(joined, dtype=torch.float32),
                position_ids=torch.tensor([[num_keys]]),
                shared_kv_states=shared,
            )
        logits = output.logits[0, 0].double().numpy()
        state, token = output.last_hidden_state[0, 0].double().numpy(), int(logits.argmax())
        yield logits


def test_shapes_of_the_toy_are_those_of_the_published_form():
    config = assistant_from_hf(assistant_config(CONFIGS["T4"], centroids=True))
    specs = split(Assistant(config, toy("T4").config, F32))[1]
    ours = {
        source.name[1:] if source.name.startswith("/") else f"model.{source.name}": source.shape
        for spec in jax.tree.leaves(specs)
        for source in spec.tensors
    }
    wanted = assistant_shapes(assistant_config(CONFIGS["T4"], centroids=True))
    assert ours == wanted | {"masked_embedding.token_ordering": (320,)}
