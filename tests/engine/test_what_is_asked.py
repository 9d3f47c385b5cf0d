"""What may be asked of an engine: prompts in every form, up to its limits, and what is refused."""

import jax.numpy as jnp
import numpy as np
import pytest

from tests.engine.toy_engine import BOS, SUPPRESSED, assert_greedy, make_engine, prompt, toy

# Limits.


@pytest.mark.parametrize(
    ("length", "max_tokens", "want"), [(95, 50, 1), (60, 100, 36), (60, 36, 36), (60, 35, 35)]
)
def test_an_answer_ends_where_the_context_does(engine, length, max_tokens, want):
    ids = prompt(length, seed=9)
    result = engine.generate(ids, max_tokens=max_tokens, ignore_eos=True)
    assert_greedy(result, want)
    assert result.finish_reason == "length"


@pytest.mark.parametrize("length", [96, 97, 500])
def test_a_prompt_that_fills_the_context_is_refused_with_both_numbers(engine, length):
    with pytest.raises(ValueError, match=rf"prompt: {length} tokens .* context of 96"):
        engine.generate(prompt(length))
    with pytest.raises(ValueError, match=rf"{length} tokens .* 96"):
        engine.stream(prompt(length))


def test_a_score_longer_than_the_context_is_refused(engine):
    with pytest.raises(ValueError, match=r"97 ids .*max_context=96"):
        engine.score(prompt(97))


def test_neighbours_at_the_end_of_their_context_are_not_disturbed(engine):
    # given rows that fill up while a run-ahead step still computes past their ends
    prompts = [prompt(n, seed=7) for n in (94, 95, 90, 60)]
    results = engine.generate(prompts, max_tokens=30, ignore_eos=True)
    assert [len(r.ids) for r in results] == [2, 1, 6, 30]
    for result in results:
        assert_greedy(result, len(result.ids))


def test_no_tokens_asked_for_none_given(engine):
    before = engine.stats()["prefills"]
    result = engine.generate([prompt(5), prompt(9)], max_tokens=0, n=2)
    assert [o.ids for r in result for o in r.outputs] == [()] * 4
    assert [o.finish_reason for r in result for o in r.outputs] == ["length"] * 4
    assert result[0].text == ""
    (delta,) = engine.stream(prompt(5), max_tokens=0)
    assert (delta.text, delta.ids, delta.finish_reason) == ("", (), "length")
    assert engine.stats()["prefills"] == before


def test_an_endless_request_ends_with_the_context(engine):
    result = engine.generate(prompt(90), max_tokens=2**31 - 1, ignore_eos=True)
    assert (len(result.ids), result.finish_reason) == (6, "length")


# Forms of prompts.


def test_empty_and_blank_texts_run_and_harm_no_neighbour(engine):
    texts = ["", " ", "\n\n", "the", ""]
    results = engine.generate(texts, max_tokens=5, ignore_eos=True)
    assert results[0].prompt_ids == results[4].prompt_ids == (BOS,)
    for result in results:
        assert result.prompt_ids[0] == BOS
        assert_greedy(result, 5)


def test_ids_are_used_as_they_are_in_any_container(engine):
    ids = prompt(9)[1:]  # without BOS
    for form in (
        ids,
        tuple(ids),
        np.array(ids),
        jnp.array(ids),
        iter(ids),
    ):
        result = engine.generate(form, max_tokens=4, ignore_eos=True)
        assert result.prompt_ids == tuple(ids)
        assert all(type(i) is int for i in (*result.prompt_ids, *result.ids))
        assert_greedy(result, 4)


def test_several_prompts_in_any_container(engine):
    rows = [prompt(5), prompt(5, seed=1)]
    for form in (rows, tuple(map(tuple, rows)), np.array(rows), iter(rows), map(np.array, rows)):
        results = engine.generate(form, max_tokens=3, ignore_eos=True)
        assert [list(result.prompt_ids) for result in results] == rows
        for result in results:
            assert_greedy(result, 3)
    mixed = engine.generate(["", prompt(5), (BOS,)], max_tokens=3, ignore_eos=True)
    assert mixed[0].ids == mixed[2].ids
    assert_greedy(mixed[1], 3)
    assert engine.generate([]) == []


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        ([[]], "no token ids"),
        (np.zeros((1, 0), int), "no token ids"),
        ([-1], "id -1 is outside"),
        ([BOS, 393], "id 393 is outside the vocabulary of 393"),
        ([BOS, True], "neither text nor"),
        ([2.0, 5.0], "neither text nor"),
        ([BOS, "the"], "neither text nor"),
        ([None], "neither text nor"),
        (None, "neither text nor"),
        (7, "neither text nor"),
        (b"the", "neither text nor"),
        ({"prompt": "the"}, "neither text nor"),
        (np.array([[[BOS]]]), "neither text nor"),
        (np.array(BOS), "neither text nor"),
        ("\ud800", "surrogate"),
        (["the", "\ud800"], "surrogate"),
    ],
)
def test_what_is_not_a_prompt_is_refused_in_words(engine, bad, words):
    with pytest.raises(ValueError, match=words):
        engine.generate(bad)


def test_one_bad_prompt_refuses_the_batch_before_any_work(engine):
    before = engine.stats()
    for bad in (prompt(97), [9999], "\ud800", None):
        with pytest.raises(ValueError, match="prompt"):
            engine.generate([*[prompt(5)] * 20, bad])
    assert engine.stats() == before


def test_an_empty_conversation_is_refused(engine):
    with pytest.raises(ValueError, match="messages"):
        engine.chat([])


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"temperature": float("nan")}, "temperature: nan"),
        ({"temperature": -1}, "temperature: -1"),
        ({"temperature": float("inf")}, "temperature: inf"),
        ({"top_p": 0}, "top_p: 0"),
        ({"top_k": -1}, "top_k: -1"),
        ({"max_tokens": -1}, "max_tokens: -1"),
        ({"seed": 2**32}, "seed: 4294967296"),
        ({"n": 0}, "n: 0"),
        ({"stop": [""]}, "stop"),
        ({"stop_token_ids": [393]}, "393 is outside"),
        ({"logit_bias": {393: 1.0}}, "393 is outside"),
        ({"logit_bias": {5: float("nan")}}, "logit_bias"),
        ({"logprobs": 21}, "logprobs: 21"),
        ({"temprature": 1}, "temprature"),
    ],
)
def test_impossible_sampling_is_refused_by_name(engine, settings, words):
    with pytest.raises(ValueError, match=words):
        engine.generate(prompt(5), **settings)


def test_sampling_that_is_no_sampling_is_refused(engine):
    with pytest.raises(ValueError, match=r"sampling: .* is not a SamplingParams"):
        engine.generate(prompt(5), {"temperature": 0.0})


def test_numpy_settings_are_numbers(engine):
    result = engine.generate(
        prompt(5),
        temperature=np.float32(0),
        max_tokens=np.int64(3),
        seed=np.uint32(7),
        ignore_eos=np.bool_(True),
        logit_bias={np.int32(320): np.float32(0)},
    )
    assert_greedy(result, 3)
    assert result.outputs[0].seed == 7


def test_no_bias_however_wild_breaks_the_law(engine):
    vocab = toy().config.vocab_size
    for bias in (-1e9, 1e9):
        result = engine.generate(
            prompt(5),
            logit_bias=dict.fromkeys(range(vocab), bias),
            temperature=1.0,
            max_tokens=3,
            logprobs=0,
        )
        assert not set(SUPPRESSED) & set(result.ids)
        assert all(np.isfinite(info.logprob) for info in result.logprobs)


# Small engines.


def test_a_context_of_two_answers_bos_with_one_token():
    small = make_engine(max_batch=1, prefill_chunks=[4], max_queue=0, max_context=2)
    small.warm_up()
    assert_greedy(small.generate("", max_tokens=5, ignore_eos=True), 1)
    with pytest.raises(ValueError, match="context of 2"):
        small.generate([BOS, 320])


def test_a_hook_that_changes_the_shape_of_logits_is_refused():
    for hook in (
        lambda logits, _: logits[:, :5],
        lambda logits, _: logits[0],
        lambda logits, _: logits.astype(jnp.bfloat16),
    ):
        small = make_engine(hook=hook, max_batch=1, prefill_chunks=[4], max_context=4)
        with pytest.raises(ValueError, match=r"logits_hook: .*float32\[1, 393\]"):
            small.generate("")
