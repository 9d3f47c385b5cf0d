"""A prompt that continues from what a slot still holds gets the answer of a cold start.

The conversations go round the ring several times (window 8, context 96), and every answer ends
at a stop, so that accepted drafts and steps on their way run past it before the host sees it.
"""

import numpy as np
import pytest

import carat_jax
from carat_jax.config import SamplingParams, sampling_from
from tests.engine.drafter_toys import W, loop, run, set_script
from tests.engine.toy_engine import prompt

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=0)
CASES = {
    "ring": ("none", 0, "ring"),
    "paged": ("none", 0, "paged"),
    "full": ("none", 0, "full"),
    "script": ("script", 4, "ring"),
    "model": ("model", 3, "full"),
    "assistant": ("assistant", 2, "ring"),
}


def warm(drafter="none", num_drafts=0, local_layers="ring", num_slots=2):
    """An engine that continues from its slots."""
    settings = {"cache__local_layers": local_layers, "engine__reuse_prefix": True}
    return loop(drafter, num_drafts, num_slots, **settings)


def cold(ids, params=GREEDY):
    """The answer of an engine that continues from nothing, without drafts."""
    return run(loop("none", engine__reuse_prefix=False), [ids], params)[0]


def say(engine, ids, text=(), params=GREEDY):
    """An engine's answer, and how many tokens it did not prefill; `text` is for a script."""
    if engine.drafter.name == "script":
        set_script(engine, [[*ids, *text]] * engine.num_slots, [4, 1, 3, 0, 4, 2])
    before = engine.counters.reused_tokens
    result = run(engine, [ids], params)[0]
    return result, engine.counters.reused_tokens - before


def assert_equal(got, want, num_ids=None):
    num_ids = len(want.ids) if num_ids is None else num_ids
    assert got.ids == want.ids[:num_ids]
    np.testing.assert_allclose(
        [info.logprob for info in got.logprobs],
        [info.logprob for info in want.logprobs[:num_ids]],
        atol=1e-4,
    )


@pytest.mark.parametrize(
    ("name", "temperature"), [*((name, 0.0) for name in CASES), ("script", 0.8)]
)
def test_each_turn_of_a_conversation_equals_a_cold_start(name, temperature):
    engine = warm(*CASES[name])
    params = sampling_from(GREEDY, temperature=temperature, seed=5)
    history = prompt(5, seed=round(10 * temperature))
    held = None
    for turn, stop_at in enumerate((4, 11, 1, 6, 9, 3)):
        want = cold(history, params)
        stop = want.ids[stop_at]
        end = want.ids.index(stop) + 1
        stopping = sampling_from(params, stop_token_ids=(stop,))
        got, reused = say(engine, history, want.ids, stopping)
        assert_equal(got, want, end)
        assert reused == (0 if held is None else len(held) - 1)
        held = [*history, *got.ids]
        # somebody else passes through the other slot
        other = prompt(3 + turn, seed=7)
        assert run(engine, [other], GREEDY)[0].ids == cold(other).ids
        history = [*held, *prompt(3 + turn, seed=turn)[1:]]
    assert len(history) > 4 * W


@pytest.mark.parametrize(
    ("local_layers", "shared", "kept"),
    [("ring", 30, 29), ("ring", 25, 0), ("full", 25, 25), ("full", 14, 0), ("paged", 25, 25)],
)
def test_a_history_that_departs_from_the_slots(local_layers, shared, kept):
    # given a slot that holds 20 ids and an answer of 10 (pages of 16 never went round)
    engine = warm(local_layers=local_layers, num_slots=1)
    ids, params = prompt(20, seed=4), sampling_from(GREEDY, max_tokens=10)
    run(engine, [prompt(2, seed=9)], params)
    first, _ = say(engine, ids, params=params)
    # when the next prompt has the first of them and then others
    history = [*[*ids, *first.ids][:shared], *prompt(9, seed=5)[1:]]
    got, reused = say(engine, history)
    assert reused == kept
    assert_equal(got, cold(history))


def test_the_same_prompt_again_cuts_a_short_slot_back():
    # given a slot whose ring never went round: six ids, and three of an answer
    engine, ids = warm(num_slots=1), prompt(6, seed=11)
    params = sampling_from(GREEDY, max_tokens=3)
    run(engine, [prompt(2, seed=9)], params)
    for expected in (0, 5, 5):
        got, reused = say(engine, ids, params=params)
        assert reused == expected
        assert_equal(got, cold(ids, params))


def test_samples_of_one_prompt_continue_together():
    engine, ids = warm(), prompt(20, seed=12)
    answer = run(engine, [ids], GREEDY)[0]
    history = [*ids, *answer.ids, *prompt(5, seed=13)[1:]]
    params = sampling_from(GREEDY, n=2, temperature=0.9, seed=3)
    before = engine.counters.reused_tokens
    got = run(engine, [history], params)[0]
    assert engine.counters.reused_tokens - before == 31
    want = cold(history, params)
    assert [output.ids for output in got.outputs] == [output.ids for output in want.outputs]


def test_scores_and_lost_states_leave_nothing_to_continue_from():
    engine, ids = warm(num_slots=1), prompt(20, seed=14)
    answer = run(engine, [ids], GREEDY)[0]
    history = [*ids, *answer.ids, *prompt(5, seed=15)[1:]]
    engine.score_ids(prompt(40))
    got, reused = say(engine, history)
    assert reused == 0
    assert_equal(got, cold(history))
    request = engine.submit(prompt(30), GREEDY)
    engine.step()
    with pytest.raises(ZeroDivisionError), engine._guarded():
        raise ZeroDivisionError
    engine.cancel(request)
    got, reused = say(engine, history)
    assert reused == 0
    assert_equal(got, cold(history))


def test_a_switch_turns_it_off():
    before, ids = loop("none", engine__reuse_prefix=False).counters.reused_tokens, prompt(20)
    cold([*ids, *cold(ids).ids, *prompt(5)[1:]])
    assert loop("none", engine__reuse_prefix=False).counters.reused_tokens == before == 0


def test_a_chat_continues():
    engine = {"max_batch": 1, "max_context": 256, "prefill_chunks": [32]}
    chatty = carat_jax.load("tiny", dtype="float32", engine=engine)
    settings = {"temperature": 0.0, "max_tokens": 40}
    messages = [{"role": "user", "content": "Tell me a story about a fox."}]
    for content in ("And then?", "Why?", None):
        before = chatty.stats()["reused_tokens"]
        first = chatty.chat(messages, **settings)
        assert (chatty.stats()["reused_tokens"] > before + 20) == (len(messages) > 1)
        # a score takes the only slot, and leaves nothing in it to continue from
        chatty.score("Once")
        assert first.ids == chatty.chat(messages, **settings).ids
        messages += [
            {"role": "assistant", "content": first.text},
            {"role": "user", "content": content},
        ]
