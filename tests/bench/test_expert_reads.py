"""Experts that a timed pass reads are those that an independent reference chooses for its rows."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from carat_jax.bench import device_steps
from carat_jax.bench.expert_reads import experts_read
from carat_jax.decoding.drafters import NoDrafter
from tests.engine import toy_engine
from tests.engine.drafter_toys import ScriptDrafter, empty_script, set_script
from tests.engine.test_mixture import make, toy
from tests.engine.toy_engine import prompt

CHUNK = 9


def prefilled(loop, prompts):
    """The loop with a prompt in each slot, its last id to be passed next."""
    for slot, ids in enumerate(prompts):
        known = np.asarray(ids[:-1], np.int32)
        for start in range(0, len(known), CHUNK):
            chunk = known[None, start : start + CHUNK]
            rows = np.pad(chunk, ((0, 0), (0, CHUNK - chunk.shape[1])))
            num_valid, where = np.int32([chunk.shape[1]]), np.int32([slot])
            loop._state, _ = loop._steps.prefill(loop._params, loop._state, rows, num_valid, where)
    last = jnp.asarray([ids[-1] for ids in prompts], jnp.int32)
    is_active = jnp.ones(len(prompts), bool)
    loop._state = dataclasses.replace(loop._state, tokens=last, is_active=is_active)
    return loop


def mean_union(texts, num_rows):
    """Distinct experts of the last rows of all texts, on average over the layers."""
    model, num_layers = toy(), toy().raw["num_hidden_layers"]
    is_read = np.zeros((num_layers, model.raw["num_experts"]), bool)
    for ids in texts:
        model.reference.hidden(ids)
        for i in range(num_layers):
            is_read[i] |= (model.reference.trace[f"layers.{i}.shares"][-num_rows:] > 0).any(0)
    return is_read.sum(1).mean()


PROMPTS = [prompt(20), prompt(15, seed=1)]


def test_a_verify_pass_reads_the_union_of_its_slots_rows():
    step = device_steps.verify(prefilled(make(NoDrafter(), num_slots=2), PROMPTS), 2)
    step.compile()
    tokens = step.rows[0]
    assert len(np.unique(tokens)) == 4  # equal ids would go to the same experts
    texts = [[*ids[:-1], *tokens[slot].tolist()] for slot, ids in enumerate(PROMPTS)]
    want = mean_union(texts, 2)
    assert experts_read({0: step}, samples=1)[0] == pytest.approx(want)
    assert 3 < want < 10, "neither one row's experts nor all"


@pytest.mark.parametrize("uniform_rows", [0, 5])
def test_a_round_reads_the_union_of_its_last_tokens_and_drafts(uniform_rows):
    decode = {"uniform_rows": uniform_rows}
    loop = prefilled(make(ScriptDrafter(2), empty_script(2), num_slots=2, decode=decode), PROMPTS)
    texts = [[*ids, 330 + slot, 340] for slot, ids in enumerate(PROMPTS)]
    set_script(loop, texts, [2])
    step = device_steps.whole_round(loop)
    if not uniform_rows:  # which compiles by a first round
        step.compile()
    assert experts_read({0: step}, samples=1)[0] == pytest.approx(mean_union(texts, 3))
    # It has been called once: what is looked at next is another round.
    assert loop._state.bank.lengths.tolist() > [len(ids) - 1 for ids in PROMPTS]


def test_a_slot_that_does_not_run_reads_nothing():
    loop = prefilled(make(NoDrafter(), num_slots=2), PROMPTS)
    is_active = jnp.asarray([True, False])
    loop._state = dataclasses.replace(loop._state, is_active=is_active)
    step = device_steps.whole_round(loop)
    step.compile()
    assert experts_read({0: step}, samples=2) == {0: toy().raw["top_k_experts"]}


def test_a_model_without_experts_has_nothing_to_count():
    engine = toy_engine.make_engine(max_batch=1, max_context=32, prefill_chunks=[8])
    assert experts_read({0: device_steps.verify(engine.loop, 1)}) == {0: None}
