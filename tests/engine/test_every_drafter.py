"""Whoever drafts and however many tokens, the answers are plain decoding's, and drafts are right.

Three slots of unequal lengths run together; each text passes several turns of the ring.
"""

import functools
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from carat_jax.config import sampling_from
from carat_jax.engine.compile_counter import num_compilations
from carat_jax.engine.draft_length import DraftLength
from carat_jax.engine.engine import EngineLoop
from carat_jax.model.assistant import draft, target_views
from carat_jax.model.gemma4 import Gemma4
from carat_jax.model.params import merge, split
from tests.engine.drafter_toys import (
    GREEDY,
    LONGEST,
    Lengths,
    any_length,
    assistant_reference,
    draft_model_reference,
    drafting,
    loop,
    run,
    set_script,
)
from tests.engine.toy_engine import CONTEXT, LINES, line_ids, prompt, scripted_hook, starts, toy

DRAFTERS = ("script", "ngram", "assistant", "combined", "model")
# The longest one repeats itself, so that something can be looked up.
PROMPTS = [prompt(3), prompt(8), (prompt(7) * 3)[:20]]
DRAWN = sampling_from(GREEDY, temperature=0.8, top_k=20, top_p=0.9, seed=42, logprobs=2)


@functools.cache
def answers(params=GREEDY):
    """What plain decoding says to each prompt, alone."""
    return [run(loop("none"), [ids], params)[0] for ids in PROMPTS]


def prepared(name: str, lengths=(LONGEST,), most: int = LONGEST) -> EngineLoop:
    """An engine whose rounds draft these lengths in turn, of which `most` tokens count at most."""
    engine = any_length(name)
    engine._length = Lengths(lengths)
    engine._params["draft"] |= {"most": jnp.int32(most)}
    if name == "script":
        texts = [[*ids, *want.ids] for ids, want in zip(PROMPTS, answers(), strict=True)]
        set_script(engine, texts, np.random.default_rng(0).integers(0, most + 1, 97))
    return engine


def test_plain_answers_are_the_references():
    for ids, want in zip(PROMPTS, answers(), strict=True):
        told, gap = toy().reference.greedy(ids, 60)
        assert gap > 1e-3
        assert want.ids == tuple(told)


@pytest.mark.parametrize("length", range(1, LONGEST + 1))
@pytest.mark.parametrize("name", DRAFTERS)
def test_greedy_ids_are_plain_decodings_in_a_batch_and_alone(name, length):
    engine = prepared(name, most=length)
    results = run(engine, PROMPTS)
    assert [r.ids for r in results] == [want.ids for want in answers()]
    assert run(engine, PROMPTS[:1])[0].ids == answers()[0].ids
    drafted = sum(sum(r.acceptance.drafted) for r in results)
    assert drafted > 0
    for result in results:
        # every round but those of a lookup without a match had all its drafts verified
        places = result.acceptance.drafted[:length]
        assert name == "ngram" or places == [result.acceptance.slot_rounds] * length


@pytest.mark.parametrize("name", ["combined", "model"])
def test_lengths_that_change_from_round_to_round_give_the_plain_ids(name):
    results = run(prepared(name, [LONGEST, 0, LONGEST, 0, 0], most=3), PROMPTS)
    assert [r.ids for r in results] == [want.ids for want in answers()]


def test_drawn_ids_and_logprobs_are_plain_samplings():
    results = run(prepared("combined"), PROMPTS, DRAWN)
    for got, want in zip(results, answers(DRAWN), strict=True):
        assert got.ids == want.ids
        for ours, theirs in zip(got.logprobs, want.logprobs, strict=True):
            assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-4)


@pytest.mark.parametrize("name", DRAFTERS)
def test_the_end_of_the_context_cuts_drafts(name):
    # given texts that repeat themselves and leave 6 and 2 places, fewer than are drafted
    texts = [(prompt(7) * 20)[: CONTEXT - left] for left in (6, 2)]
    params = sampling_from(GREEDY, max_tokens=50)
    want = [run(loop("none"), [ids], params)[0] for ids in texts]
    got = run(prepared(name), texts, params)
    assert [r.ids for r in got] == [r.ids for r in want]
    assert [(len(r.ids), r.finish_reason) for r in got] == [(6, "length"), (2, "length")]


def test_who_drafted_what_is_counted():
    result = run(prepared("combined"), PROMPTS)[2]
    by_drafter = result.acceptance.by_drafter
    assert set(by_drafter) == {"ngram", "assistant"}
    assert sum(sums["drafted"] for sums in by_drafter.values()) == sum(result.acceptance.drafted)
    assert sum(sums["accepted"] for sums in by_drafter.values()) == sum(result.acceptance.accepted)
    engine = prepared("model", most=3)
    before = engine.stats()["by_drafter"].get("model", {"drafted": 0})["drafted"]
    result = run(engine, PROMPTS[:1])[0]
    sums = result.acceptance.by_drafter["model"]
    assert sums["drafted"] == 3 * result.acceptance.slot_rounds
    assert engine.stats()["by_drafter"]["model"]["drafted"] == before + sums["drafted"]
    # every token but the first and what was passed over at the end came from a round
    assert sums["accepted"] + result.acceptance.slot_rounds >= 59
    assert 0.3 < sums["accepted"] / sums["drafted"] < 0.99


# What is drafted.


@functools.cache
def assistant_burst():
    """The assistant's logits and drafts on the state of any engine of the toy."""
    graph, _ = split(Gemma4(toy().config, toy().dtype))
    made = drafting("assistant", 4)

    @jax.jit
    def burst(target_params, params, state):
        target, assistant = merge(graph, target_params), merge(made.drafter.graph, params)
        where = state.tokens, state.hidden, state.bank.lengths
        return draft(assistant, target, target_views(target, state.bank), *where, 4)

    return lambda state: burst(toy().params["target"], made.params, state)


def texts_of(state):
    """Ids of every active slot, the bonus token last."""
    for slot in np.flatnonzero(np.asarray(state.is_active)):
        yield slot, np.asarray(state.ids)[slot, : int(state.bank.lengths[slot]) + 1].tolist()


def test_an_assistant_drafts_the_numpy_drafters_tokens_after_any_count_of_accepted_ones():
    # given slots in which 0 to 4 of 4 drafts stand, at lengths around the window and past it
    engine, counts = loop("script", 4, 3), set()
    texts = [[*ids, *want.ids] for ids, want in zip(PROMPTS, answers(), strict=True)]
    set_script(engine, texts, np.random.default_rng(2).integers(0, 5, 97))
    requests = [engine.submit(ids, sampling_from(GREEDY, max_tokens=30)) for ids in PROMPTS]
    held = {}
    while not all(request.is_finished for request in requests):
        engine.step()
        state = engine._state
        burst = assistant_burst()(state)
        for slot, ids in texts_of(state):
            counts.add(len(ids) - held.get(slot, len(ids)) - 1)
            held[slot] = len(ids)
            steps = assistant_reference().burst(ids, 4)
            want = np.array([step.logits for step in steps])
            np.testing.assert_allclose(burst.logits[slot], want, atol=2e-4)
            assert burst.tokens[slot].tolist() == [step.token for step in steps]
    run(engine, [])
    assert counts >= {0, 1, 2, 3, 4}


def test_a_draft_model_goes_on_as_it_would_alone():
    # given rounds in which some of its drafts stand; its own caches must follow the target's
    engine = prepared("model", most=3)
    made = drafting("model", 3)
    graph, _ = split(Gemma4(toy().config, toy().dtype))

    @jax.jit
    def propose(target_params, params, state):
        target = merge(graph, target_params)
        return made.drafter.propose(params, state.draft, target, state)[0]

    requests = [engine.submit(ids, sampling_from(GREEDY, max_tokens=20)) for ids in PROMPTS]
    seen = 0
    while not all(request.is_finished for request in requests):
        engine.step()
        tokens = propose(toy().params["target"], made.params, engine._state).tokens
        for slot, ids in texts_of(engine._state):
            want, gap = draft_model_reference().greedy(ids, 3)
            if gap > 1e-3 and max(want) < 300:  # neither a tie nor a suppressed token
                assert tokens[slot].tolist() == want
                seen += 1
    run(engine, [])
    assert seen >= 6


# What a request can ask for.


def test_a_hook_and_stops_work_on_drafts_too():
    # given a hook that leaves one token, of drafts too: whole blocks stand, with stops inside them
    hooked, alone = loop("assistant", 3, hook=scripted_hook), loop("none", hook=scripted_hook)
    ids = prompt(starts()["abcd"])
    for wanted in (
        {},
        {"stop": ("abc",)},
        {"stop": ("x",)},
        {"stop": ("bc", "d")},
        {"max_tokens": 2},
    ):
        params = sampling_from(GREEDY, ignore_eos=False, **wanted)
        request = hooked.submit(ids, params)
        hooked.run([request])
        got, want = request.result(), run(alone, [ids], params)[0]
        assert (got.text, got.ids, got.finish_reason) == (want.text, want.ids, want.finish_reason)
        # and a stream tells one token at a time, as without drafts
        deltas = list(request.samples[0].deltas)
        assert "".join(delta.text for delta in deltas) == want.text
        assert [delta.ids for delta in deltas] == [(i,) for i in want.ids]
        run(hooked, [])
    assert got.ids == tuple(line_ids("abcd")[:2])
    result = run(hooked, [ids], sampling_from(GREEDY, ignore_eos=False))[0]
    assert sum(result.acceptance.accepted) >= len(LINES["abcd"]) - 2


@pytest.mark.parametrize("temperature", [1e-9, 1e-6, 1e-4, 1e-3])
def test_a_temperature_near_zero_is_greedy_beside_a_hot_neighbour(temperature):
    engine = loop("model", 2, 3, samples=True)
    laws = [{"temperature": temperature}, {"temperature": 1.0, "seed": 1}, {}]
    requests = [engine.submit(PROMPTS[1], sampling_from(GREEDY, **law)) for law in laws]
    engine.run(requests)
    cold, hot, greedy = (request.result().ids for request in requests)
    assert cold == greedy == answers()[1].ids
    assert hot != greedy


def test_drawn_drafts_repeat_with_the_seed_whoever_runs_beside():
    engine = loop("model", 2, 3, samples=True)
    params = sampling_from(GREEDY, temperature=0.8, seed=7, max_tokens=30)
    alone = run(engine, [PROMPTS[1]], params)[0]
    assert 0 < sum(alone.acceptance.accepted) < sum(alone.acceptance.drafted)
    hot = sampling_from(GREEDY, temperature=1.5, max_tokens=40)
    others = [engine.submit(PROMPTS[0], hot), engine.submit(PROMPTS[2], GREEDY)]
    assert run(engine, [PROMPTS[1]], params)[0].ids == alone.ids
    engine.run(others)
    assert run(engine, [PROMPTS[1]], sampling_from(params, seed=8))[0].ids != alone.ids


# A long run.


def test_a_long_mixed_run_with_a_chosen_length_compiles_nothing(monkeypatch, caplog):
    # given rounds of 0 or 3 drafts, whose costs make drafting pay or not
    monkeypatch.setattr("carat_jax.engine.engine.CHOICES", (0, 3))
    engine = loop("ngram", 3, 2, decode__draft_len="auto")
    engine.warm_up()
    compiled = num_compilations()
    kinds = [{}, {"temperature": 0.9, "seed": 3}, {"repetition_penalty": 1.2}, {"logprobs": 2}]
    kinds += [{"n": 2, "temperature": 1.0}, {"logit_bias": ((5, 1.0),)}, {"max_tokens": 3}]
    for turn, costs in enumerate([{0: 1.0, 3: 1.0}, {0: 1.0, 3: 9.0}]):
        engine._length = DraftLength((0, 3))
        monkeypatch.setattr(engine._length, "observe_cost", lambda *_: None)
        engine._length._cost.update(costs)
        with caplog.at_level(logging.WARNING):
            requests = [
                engine.submit(
                    prompt(1 + 7 * i), sampling_from(GREEDY, **({"max_tokens": 12} | kind))
                )
                for i, kind in enumerate(kinds * 2)
                if 1 + 7 * i < 80
            ]
            engine.run(requests)
            greedy = run(engine, PROMPTS)
        assert [r.ids for r in greedy] == [want.ids for want in answers()]
        # then a drafter that does not pay stands down, and says so once
        told = [
            r.getMessage() for r in caplog.records if "drafts nothing for now" in r.getMessage()
        ]
        assert len(told) == turn
    assert num_compilations() == compiled
