"""The engine against the cache-free reference and against itself alone: ids, laws, counts.

Shared engines (`conftest`) run test after test without a reset, so each test also says that
nothing is left of the ones before it.
"""

import collections

import jax.numpy as jnp
import numpy as np
import pytest

from carat_jax.config import SamplingParams, sampling_from
from tests.engine.toy_engine import (
    BOS,
    CONTEXT,
    FREE,
    HALVED,
    SUPPRESSED,
    assert_greedy,
    make_engine,
    prompt,
    reference_logits,
    reference_logprobs,
    toy,
)
from tests.oracle import log_softmax, softmax

LENGTHS = (1, 2, 5, 8, 9, 21, 40, 60)


# Compilation: the first test, so that what it counts nobody compiled before.


def test_nothing_compiles_after_warm_up(engine):
    engine.warm_up()
    before = engine.stats()["compilations"]
    for length in range(1, 91):
        engine.generate(
            prompt(length),
            max_tokens=1 + length % 3,
            temperature=(0.0, 0.7)[length % 2],
            top_k=(0, 5)[length // 2 % 2],
            logprobs=(None, 0, 4)[length % 3],
            logit_bias=({}, {320: 1.0})[length // 4 % 2],
            repetition_penalty=(1.0, 1.3)[length // 8 % 2],
            seed=(None, length)[length % 2],
            n=1 + length % 5,
            ignore_eos=bool(length % 2),
        )
    engine.generate([prompt(n) for n in (3, 80, 9, 33, 1)], top_p=0.5, min_p=0.1)
    list(engine.stream("the thought", stop=["abc"], temperature=0.5))
    engine.chat([{"role": "user", "content": "hi"}], max_tokens=4)
    engine.score(prompt(50), num_top=3)
    stream = engine.stream(prompt(9))
    next(stream)
    stream.close()
    assert engine.stats()["compilations"] == before


# Batches.


def test_a_batch_of_unequal_prompts_writes_the_reference_text_of_each(engine):
    prompts = [prompt(n) for n in LENGTHS]
    results = engine.generate(prompts, max_tokens=20, ignore_eos=True)
    for ids, result in zip(prompts, results, strict=True):
        assert result.prompt_ids == tuple(ids)
        assert_greedy(result, 20)
        assert result.finish_reason == "length"


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_batch_equals_single_runs_in_any_order(engine, temperature):
    prompts = [prompt(n, seed=1) for n in LENGTHS]
    settings = {"max_tokens": 15, "ignore_eos": True, "temperature": temperature, "seed": 11}
    alone = [engine.generate(ids, **settings).ids for ids in prompts]
    batch = [result.ids for result in engine.generate(prompts, **settings)]
    turned = [result.ids for result in engine.generate(prompts[::-1], **settings)]
    assert batch == alone
    assert turned[::-1] == alone
    assert len(set(alone)) == len(alone)


def test_samples_of_a_prompt_prefill_once_and_differ(engine):
    ids, before = prompt(21), engine.stats()
    result = engine.generate(ids, n=4, temperature=1.0, seed=3, max_tokens=12, ignore_eos=True)
    after = engine.stats()
    assert after["prefills"] - before["prefills"] == 1
    assert [output.index for output in result.outputs] == [0, 1, 2, 3]
    assert len({output.ids for output in result.outputs}) == 4
    assert result.num_generated == after["generated_tokens"] - before["generated_tokens"] == 48


def test_each_sample_equals_a_run_of_that_sample_alone(engine):
    params = sampling_from(
        SamplingParams(), n=3, temperature=1.0, seed=3, max_tokens=12, ignore_eos=True
    )
    together = engine.generate(prompt(21), params)
    for output in together.outputs:
        request = engine.loop.submit(prompt(21), sampling_from(params, n=1))
        request.samples[0].index = output.index
        engine.loop.run([request])
        assert request.result().ids == output.ids


def test_more_samples_than_slots_are_all_drawn(engine):
    result = engine.generate(prompt(9), n=7, temperature=1.0, seed=5, max_tokens=6, ignore_eos=True)
    few = engine.generate(prompt(9), n=2, temperature=1.0, seed=5, max_tokens=6, ignore_eos=True)
    assert [len(output.ids) for output in result.outputs] == [6] * 7
    assert result.outputs[:2] == few.outputs


def test_samplers_of_neighbours_do_not_mix(engine):
    ids, common = prompt(9), {"max_tokens": 10, "ignore_eos": True}
    settings = [
        {"temperature": 0.0},
        {"temperature": 1.0, "seed": 1},
        {"temperature": 1.0, "seed": 1, "top_k": 2},
        {"temperature": 0.0, "repetition_penalty": 0.5},
        {"temperature": 0.0, "logit_bias": {350: 50.0}},
        {"temperature": 2.0, "seed": 1, "min_p": 0.3, "logprobs": 2},
    ]
    alone = [engine.generate(ids, **common, **one).outputs for one in settings]
    loop = engine.loop
    params = [sampling_from(engine.config.sampling, **common, **one) for one in settings]
    requests = [loop.submit(ids, one) for one in params]
    loop.run(requests)
    for request, want in zip(requests, alone, strict=True):
        got = request.result().outputs
        assert [o.ids for o in got] == [o.ids for o in want]
        for one, other in zip(got, want, strict=True):
            np.testing.assert_allclose(
                [info.logprob for info in one.logprobs or ()],
                [info.logprob for info in other.logprobs or ()],
                atol=1e-5,
            )
    assert len({outputs[0].ids for outputs in alone}) == len(alone)


# Seeds.


def test_a_seed_gives_the_same_ids_wherever_and_whenever_it_runs(engine, scripted):
    # given positions where the scripted engine, which has other slots and chunks, speaks freely
    ids, loop = prompt(FREE), engine.loop
    mine = {"temperature": 0.8, "seed": 42, "max_tokens": HALVED - FREE, "ignore_eos": True}
    mine["logprobs"] = 0
    alone = engine.generate(ids, **mine).ids
    assert engine.generate(ids, **mine).ids == alone
    others = [
        {"temperature": 1.0},
        {"temperature": 0.0},
        {"temperature": 1.0, "top_k": 5, "repetition_penalty": 1.2},
    ]
    for row in (0, 3):
        settings = [*others[:row], mine, *others[row:]]
        requests = [
            loop.submit(ids if one is mine else prompt(8), sampling_from(SamplingParams(), **one))
            for one in settings
        ]
        loop.run(requests)
        assert requests[row].result().ids == alone
    assert scripted.generate(ids, **mine).ids == alone
    assert scripted.generate([prompt(FREE, seed=3), ids], **mine)[1].ids == alone


def test_seeds_differ_and_no_seed_differs_each_time(engine):
    common = {"temperature": 1.0, "max_tokens": 12, "ignore_eos": True}
    runs = [engine.generate(prompt(9), seed=seed, **common) for seed in (1, 2, 2**32 - 1)]
    runs += [engine.generate(prompt(9), **common) for _ in range(3)]
    assert len({run.ids for run in runs}) == 6
    assert [run.outputs[0].seed for run in runs[:3]] == [1, 2, 2**32 - 1]
    # when the drawn seed is given back
    for run in runs[3:]:
        assert engine.generate(prompt(9), seed=run.outputs[0].seed, **common).ids == run.ids


@pytest.mark.parametrize("temperature", [0.0, 1e-9, 1e-6, 1e-5, 1e-4, 1e-3])
def test_cold_sampling_is_greedy(engine, temperature):
    prompts = [prompt(9, seed=2), prompt(40, seed=1)]
    settings = {"temperature": temperature, "seed": 1, "max_tokens": 12, "ignore_eos": True}
    for result in engine.generate(prompts, **settings):
        assert_greedy(result, 12)


def test_draws_of_many_requests_follow_the_reference_law(engine):
    # given four tokens that the bias leaves, of which top_k drops one
    ids, live = prompt(9), [320, 330, 340, 350]
    vocab = toy().config.vocab_size
    bias = {i: -1e4 for i in range(vocab) if i not in live}
    logits = np.full(vocab, -np.inf)
    logits[live] = reference_logits(ids)[-1][live] / 0.7
    logits[min(live, key=lambda i: logits[i])] = -np.inf
    settings = {"temperature": 0.7, "top_k": 3, "max_tokens": 1, "logit_bias": bias}
    params = sampling_from(SamplingParams(), n=8, **settings)
    counts = collections.Counter()
    for seed in range(40):
        result = engine.generate(ids, params, seed=seed)
        counts.update(output.ids[0] for output in result.outputs)
    expected = {i: 320 * p for i, p in enumerate(softmax(logits)) if p > 0}
    assert set(counts) <= set(expected)
    # two degrees of freedom: 20 is passed once in 20,000
    assert sum((counts[i] - n) ** 2 / n for i, n in expected.items()) < 20


# Laws and log-probabilities.


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_logprobs_are_the_reference_log_softmax_before_temperature(engine, temperature):
    ids = prompt(21)
    result = engine.generate(
        ids, temperature=temperature, seed=8, top_k=5, max_tokens=12, logprobs=3, ignore_eos=True
    )
    law = reference_logprobs(ids, result.ids)
    assert len(result.logprobs) == 12
    for row, token, info in zip(law, result.ids, result.logprobs, strict=True):
        assert info.logprob == pytest.approx(row[token], abs=2e-4)
        assert [i for i, _ in info.top] == np.argsort(-row)[:3].tolist()
        np.testing.assert_allclose([p for _, p in info.top], -np.sort(-row)[:3], atol=2e-4)


def test_logprobs_of_the_chosen_token_alone(engine):
    result = engine.generate(prompt(5), max_tokens=3, logprobs=0, ignore_eos=True)
    law = reference_logprobs(prompt(5), result.ids)
    np.testing.assert_allclose(
        [info.logprob for info in result.logprobs], law[range(3), result.ids], atol=2e-4
    )
    assert all(info.top == () for info in result.logprobs)
    assert engine.generate(prompt(5), max_tokens=3).logprobs is None


def test_repetition_penalty_changes_the_law_of_seen_tokens(engine):
    # given a penalty over prompt and output, written out from transformers' formula
    ids = prompt(9, seed=2)
    result = engine.generate(
        ids, repetition_penalty=1.5, temperature=0.0, max_tokens=15, logprobs=0, ignore_eos=True
    )
    known = list(ids)
    for token, info in zip(result.ids, result.logprobs, strict=True):
        logits = reference_logits(known)[-1]
        seen = np.unique(known)
        logits[seen] = np.where(logits[seen] > 0, logits[seen] / 1.5, logits[seen] * 1.5)
        assert token == logits.argmax()
        assert info.logprob == pytest.approx(log_softmax(logits)[token], abs=2e-4)
        known.append(token)
    assert result.ids != engine.generate(ids, max_tokens=15, ignore_eos=True).ids


def test_logit_bias_changes_the_law(engine):
    ids, bias = prompt(9), {320: 2.5, 150: -4.0}
    result = engine.generate(ids, logit_bias=bias, max_tokens=5, logprobs=0, ignore_eos=True)

    def biased(logits):
        logits[:, 320] += 2.5
        logits[:, 150] -= 4.0
        return logits

    law = reference_logprobs(ids, result.ids, biased)
    assert result.ids == tuple(law.argmax(axis=-1))
    np.testing.assert_allclose(
        [info.logprob for info in result.logprobs], law.max(axis=-1), atol=2e-4
    )


def test_a_bias_does_not_stay_behind_in_the_slot(engine):
    forced = engine.generate([prompt(5)] * 4, logit_bias={320: 1e9}, max_tokens=4)
    assert all(result.ids == (320,) * 4 for result in forced)
    plain = engine.generate([prompt(5)] * 4, max_tokens=4, ignore_eos=True)
    for result in plain:
        assert_greedy(result, 4)


def test_a_hook_is_part_of_the_law(scripted):
    # given the scripted engine past the position from which its hook halves the logits
    ids = prompt(HALVED)
    result = scripted.generate(ids, max_tokens=6, logprobs=0, temperature=1.0, seed=2)
    law = reference_logprobs(ids, result.ids, lambda logits: logits / 2)
    np.testing.assert_allclose(
        [info.logprob for info in result.logprobs],
        law[range(len(result.ids)), result.ids],
        atol=2e-4,
    )


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_suppressed_tokens_are_never_said_and_the_law_is_over_the_others(engine, temperature):
    bias = {i: 50.0 for i in SUPPRESSED} | {320: 49.0, 321: 48.0}
    result = engine.generate(
        prompt(9), n=2, temperature=temperature, seed=4, logit_bias=bias, max_tokens=8, logprobs=20
    )
    for output in result.outputs:
        assert not set(SUPPRESSED) & set(output.ids)
        for info in output.logprobs:
            assert not set(SUPPRESSED) & {i for i, _ in info.top}
            assert sum(np.exp(p) for _, p in info.top) == pytest.approx(1, abs=1e-3)


# Scores.


@pytest.mark.parametrize("length", [1, 2, 8, 9, 33, CONTEXT])
def test_scores_are_the_reference_log_softmax(engine, length):
    ids = prompt(length, seed=5)
    scores = engine.score(ids, num_top=2)
    law = log_softmax(toy().reference.logits(ids))
    assert len(scores) == length
    assert scores[0] is None
    for i, info in enumerate(scores[1:]):
        assert info.logprob == pytest.approx(law[i, ids[i + 1]], abs=2e-4)
        assert [token for token, _ in info.top] == np.argsort(-law[i])[:2].tolist()


def test_scores_of_an_answer_are_its_own_logprobs(engine):
    result = engine.generate(
        prompt(21), max_tokens=10, temperature=0.8, seed=1, logprobs=0, ignore_eos=True
    )
    ids = [*result.prompt_ids, *result.ids]
    scores = engine.score(ids)[21:]
    # a score knows no suppressed tokens, an answer's law is over the others
    law = softmax(toy().reference.logits(ids)[20:-1])
    allowed = np.log(1 - law[:, list(SUPPRESSED)].sum(axis=-1))
    np.testing.assert_allclose(
        [info.logprob for info in scores],
        [info.logprob for info in result.logprobs] + allowed,
        atol=2e-4,
    )


def test_scoring_waits_for_a_slot_and_disturbs_nobody(engine):
    requests = [
        engine.loop.submit(prompt(n), sampling_from(engine.config.sampling, ignore_eos=True))
        for n in (5, 8, 9, 21, 2, 40)
    ]
    engine.loop.step()
    scores = engine.score(prompt(9))
    law = log_softmax(toy().reference.logits(prompt(9)))
    want = [law[i, token] for i, token in enumerate(prompt(9)[1:])]
    np.testing.assert_allclose([info.logprob for info in scores[1:]], want, atol=2e-4)
    engine.loop.run(requests)
    for request in requests:
        assert_greedy(request.result(), 16)


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
    assert len(result.ids) == 6


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


# Counters.


def test_stats_count_requests_tokens_prefills_and_steps(engine):
    before = engine.stats()
    # the chunks of both prompts, 8 and 32, are more than one gap takes: a round lies between
    engine.generate([prompt(5), prompt(9)], n=2, max_tokens=4, ignore_eos=True)
    after = engine.stats()
    counts = {"requests": 2, "prompt_tokens": 14, "generated_tokens": 16, "prefills": 2}
    counts |= {"rounds": 4, "slot_rounds": 12, "restarts": 0, "waiting": 0, "running": 0}
    assert {name: after[name] - before[name] for name in counts} == counts
    assert after["weight_bytes"] == 4 * sum(w.size for w in toy().reference.weights.values())


def test_timings_add_up(engine):
    result = engine.generate(prompt(40), max_tokens=10, ignore_eos=True)
    times = result.timings
    assert times.queue >= 0
    assert times.prefill > 0
    assert times.decode > 0
    assert times.queue + times.prefill + times.decode < 60
