"""A toy target with a toy assistant on the engine's side, and the numpy drafter that judges them.

As in `toy_model`, parameters are placed apart from the loader: these tests do not depend on files.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from carat_jax.assistant_families import assistant_from_hf
from carat_jax.cache.bank import PLAIN, CacheKinds, empty_bank
from carat_jax.model.assistant import Assistant, draft, target_views
from carat_jax.model.gemma4 import Gemma4
from carat_jax.model.params import merge, split
from tests.assistant_oracle import ReferenceAssistant
from tests.assistant_toys import assistant_config, assistant_weights
from tests.oracle import top2_gap
from tests.toy_model import MAX_ROWS, place_all, toy
from tests.toys import CONFIGS

NUM_SLOTS = 5
F32 = jnp.dtype("float32")
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
