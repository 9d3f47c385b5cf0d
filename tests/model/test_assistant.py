"""The MTP assistant against an independent numpy drafter over the reference's keys and values.

Slots of unequal lengths draft together, so that each comparison also says that a neighbour changes
nothing. The mistakes further down are what public engines got wrong; each must be visible here.
"""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from carat_jax.cache.bank import CacheKinds
from tests.assistant_oracle import ReferenceAssistant
from tests.assistant_pair import NUM_STEPS, pair
from tests.assistant_toys import assistant_config, assistant_weights, write_assistant
from tests.oracle import Reference
from tests.toy_model import MAX_ROWS, poison
from tests.toys import CONFIGS, make_ids, make_weights

W = 8
LENGTHS = (3, W, W + 1, 20, 40)  # of keys: before, at and past the window, turns of the ring


def texts_of(lengths, seed=5) -> list[list[int]]:
    """Texts whose last token, the bonus, comes after `lengths` keys."""
    return [make_ids(CONFIGS["T4"], n + 1, seed) for n in lengths]


def split_bonus(texts):
    return [ids[:-1] for ids in texts], [ids[-1] for ids in texts]


# Draft logits.


@pytest.mark.parametrize(
    ("target_name", "ordering"),
    [("T4", ""), ("T4e", ""), ("26b", ""), ("T4", "random"), ("T4", "identity")],
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


@pytest.mark.parametrize(
    "kinds",
    [
        CacheKinds(global_layers="v_rot"),
        CacheKinds(local_layers="paged"),
        CacheKinds(local_layers="full"),
    ],
    ids=["v_rot", "paged", "full"],
)
def test_every_kind_of_cache_gives_the_same_drafts(kinds):
    drafter = pair()
    texts = texts_of(LENGTHS)
    keys, bonus = split_bonus(texts)
    drafter.check(drafter.burst_after(keys, bonus, kinds), texts)


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
