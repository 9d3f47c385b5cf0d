"""The engine against the cache-free reference and against itself alone: batches, seeds, counts.

Shared engines (`conftest`) run test after test without a reset, so each test also says that
nothing is left of the ones before it.
"""

import collections

import numpy as np
import pytest

from carat_jax.config import SamplingParams, sampling_from
from tests.engine.toy_engine import FREE, HALVED, assert_greedy, prompt, reference_logits, toy
from tests.oracle import softmax

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


# Counters.


def test_stats_count_requests_tokens_prefills_and_steps(engine):
    before = engine.stats()
    # the chunks of both prompts, 8 and 32, are more than one gap takes: a round lies between. They
    # are no other test's, so that no slot still holds the beginning of one
    engine.generate([prompt(5, seed=77), prompt(9, seed=77)], n=2, max_tokens=4, ignore_eos=True)
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
