"""The joint law of three tokens under real rounds is the target's, counted over 50,000 slots.

A vocabulary of 16, a fixed prefix longer than the window, temperature, top-k and top-p. The law is
enumerated from the cache-free reference. Whoever drafts, counts must fit it; an acceptance that is
a little too generous must not.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from carat_jax.assistant_families import assistant_from_hf
from carat_jax.cache.bank import empty_bank
from carat_jax.decoding import steps as steps_module
from carat_jax.decoding.drafters import AssistantDrafter, ModelDrafter, NgramDrafter
from carat_jax.decoding.speculative import accept_sampled
from carat_jax.decoding.state import empty_state
from carat_jax.decoding.steps import SamplerKind, StepOptions, build_steps
from carat_jax.model.assistant import Assistant
from carat_jax.model.gemma4 import Gemma4
from carat_jax.model.params import split
from carat_jax.numerics.options import PLAIN
from tests.assistant_pair import place
from tests.assistant_toys import assistant_config, assistant_weights
from tests.toy_model import build, place_all
from tests.toys import CONFIGS, make_weights

V, TOKENS, DRAFTS = 16, 3, 2
SLOTS, BATCHES = 5000, 10
TEMPERATURE, TOP_K, TOP_P = 1.5, 7, 0.95
RAW = CONFIGS["T4"] | {
    "vocab_size": V,
    "num_hidden_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"],
}
PREFIX = [2, 5, 9, 5, 9, 3, 7, 11, 4, 5, 9, 8, 5, 9]  # what followed 5, 9 was 3 and 8: a lookup
Z = 3.719  # upper 1e-4 quantile of the normal law


def weights_of(seed: int) -> dict:
    """Random weights whose final norm flips signs: a tied head would repeat the last token."""
    weights = make_weights(RAW, seed=seed)
    weights["norm.weight"] *= np.random.default_rng(1).choice([-1, 1], 64).astype(np.float32) / 2
    return weights


@functools.cache
def toy():
    """The target."""
    return build(RAW, weights_of(1))


def law_after(ids) -> np.ndarray:
    """The target's law of the next token, in numpy."""
    logits = toy().reference.logits(ids)[-1] / TEMPERATURE
    order = np.argsort(-logits, kind="stable")[:TOP_K]
    p = np.exp(logits[order] - logits[order[0]])
    p /= p.sum()
    keep = np.cumsum(p) - p < TOP_P
    law = np.zeros(V)
    law[order[keep]] = p[keep] / p[keep].sum()
    return law


@functools.cache
def joint_law() -> np.ndarray:
    """`[V, V, V]` by enumeration."""
    joint = np.zeros((V,) * TOKENS)
    for a, pa in enumerate(law_after(PREFIX)):
        for b, pb in enumerate(law_after([*PREFIX, a])) if pa else ():
            if pb:
                joint[a, b] = pa * pb * law_after([*PREFIX, a, b])
    assert joint.sum() == pytest.approx(1)
    return joint


def drafter_of(name: str):
    """A drafter with its parameters and the state it starts with."""
    model = toy()
    if name == "ngram":
        return NgramDrafter(DRAFTS), (), ()
    if name.startswith("model"):
        graph, specs = split(Gemma4(model.config, model.dtype))
        params = place_all(specs, weights_of(9))
        own = empty_bank(model.config, 1, 32, DRAFTS + 1, model.dtype)
        return ModelDrafter(graph, DRAFTS, PLAIN, samples="drawn" in name), params, own
    raw = assistant_config(RAW, layer_types=RAW["layer_types"])
    graph, specs = split(Assistant(assistant_from_hf(raw), model.config, model.dtype))
    params = place(specs, assistant_weights(raw))
    return AssistantDrafter(graph, DRAFTS, PLAIN, samples="drawn" in name), params, ()


def counts_of(name: str) -> tuple[np.ndarray, float]:
    """How often each three tokens came, and the share of drafts that stood."""
    model = toy()
    drafter, params, own = drafter_of(name)
    graph, _ = split(Gemma4(model.config, model.dtype))
    steps = build_steps(graph, drafter, StepOptions(PLAIN, num_top=1), jnp.zeros(V))
    params = {"target": model.params["target"], "draft": params}
    bank = empty_bank(model.config, 1, 32, DRAFTS + 1, model.dtype)
    state = empty_state(bank, model.config, 32, model.dtype, own)
    known = jnp.asarray([PREFIX[:-1]], jnp.int32)
    one, _ = steps.prefill(params, state, known, np.array([len(PREFIX) - 1]), np.array([0]))
    counts, accepted, drafted = np.zeros(V**TOKENS, int), 0, 0
    for batch in range(BATCHES):
        state = jax.tree.map(lambda leaf: jnp.repeat(leaf, SLOTS, axis=0), one)
        law = {"temperature": TEMPERATURE, "top_k": TOP_K, "top_p": TOP_P, "seed": batch}
        law = {key: jnp.full_like(getattr(state.sampling, key), x) for key, x in law.items()}
        state = dataclasses.replace(
            state,
            tokens=jnp.full(SLOTS, PREFIX[-1], jnp.int32),
            ids=state.ids.at[:, len(PREFIX) - 1].set(PREFIX[-1]),
            is_active=jnp.ones(SLOTS, bool),
            sampling=dataclasses.replace(state.sampling, sample=jnp.arange(SLOTS), **law),
        )
        for _ in range(TOKENS):  # each commits at least one token
            state, drawn = steps.round(params, state, SamplerKind(draws=True, logprobs=False))
            accepted += int(jnp.sum(drawn.num - 1))
            drafted += int(jnp.sum(drawn.num_drafts))
        told = np.asarray(state.ids)[:, len(PREFIX) :][:, :TOKENS]
        counts += np.bincount(told @ V ** np.arange(TOKENS)[::-1], minlength=V**TOKENS)
    return counts, accepted / drafted


def chi_square_excess(counts: np.ndarray) -> float:
    """How far chi-square lies beyond its 1e-4 quantile, cells pooled to an expected count of 5."""
    expected = joint_law().reshape(-1) * counts.sum()
    assert counts[expected == 0].sum() == 0  # tokens that are cut off must not appear at all
    big = expected >= 5
    want, got = [*expected[big], expected[~big].sum()], [*counts[big], counts[~big].sum()]
    if want[-1] < 5:
        want, got = want[:-1], got[:-1]
    k = len(want) - 1
    assert k >= 20
    # Wilson and Hilferty's approximation.
    quantile = k * (1 - 2 / (9 * k) + Z * np.sqrt(2 / (9 * k))) ** 3
    return ((np.array(got) - want) ** 2 / want).sum() - quantile


@pytest.mark.parametrize("name", ["assistant, drawn", "model, drawn", "ngram"])
def test_three_tokens_follow_the_targets_law(name):
    counts, share = counts_of(name)
    assert 0.02 < share < 0.98  # drafts that stand and drafts that fall
    assert counts.sum() == SLOTS * BATCHES
    assert chi_square_excess(counts) < 0


def test_an_acceptance_that_is_a_little_too_generous_is_found_out(monkeypatch):
    def generous(drafts, draft_logits, target_logits, num_drafts, uniforms, noise):
        lower = uniforms / 1.25
        return accept_sampled(drafts, draft_logits, target_logits, num_drafts, lower, noise)

    monkeypatch.setattr(steps_module, "accept_sampled", generous)
    assert chi_square_excess(counts_of("assistant, drawn")[0]) > 0
