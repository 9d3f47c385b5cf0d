"""After a failed, aborted or abandoned request the engine serves the next one as if fresh.

A step that fails is one that consumed its donated state first: the worst moment there is.
"""

import dataclasses
import gc

import jax
import jax.numpy as jnp
import pytest

from carat_jax.config import sampling_from
from tests.engine.toy_engine import BROKEN, assert_greedy, make_engine, prompt

SETTINGS = {"temperature": 0.9, "max_tokens": 14, "ignore_eos": True}


@pytest.fixture(scope="module")
def fresh(engine):
    """What an undisturbed engine answers: a function of the prompt's length."""
    return {n: engine.generate(prompt(n), seed=n, **SETTINGS).ids for n in (2, 5, 9, 21, 40)}


def assert_serves(engine, fresh):
    """Every slot gives what a fresh engine gives."""
    requests = [
        engine.loop.submit(prompt(n), sampling_from(engine.config.sampling, seed=n, **SETTINGS))
        for n in fresh
    ]
    engine.loop.run(requests)
    assert {len(r.prompt_ids): r.result().ids for r in requests} == fresh


@pytest.fixture
def break_step(engine, monkeypatch):
    """Makes a step of the engine raise at its n-th call, after it ran."""

    def break_it(name, error, at=1):
        step, calls = getattr(engine.loop._steps, name), []

        def broken(*args, **kwargs):
            result = step(*args, **kwargs)
            calls.append(None)
            if len(calls) == at:
                raise error
            return result

        steps = dataclasses.replace(engine.loop._steps, **{name: broken})
        monkeypatch.setattr(engine.loop, "_steps", steps)

    return break_it


# A consumer that goes away.


def test_a_closed_stream_frees_its_slot_at_once(engine, fresh):
    stream = engine.stream(prompt(9), **SETTINGS)
    for _ in range(3):
        next(stream)
    assert engine.stats()["running"] == 1
    stream.close()
    assert engine.stats()["running"] == 0
    assert engine.loop.is_idle
    assert_serves(engine, fresh)


@pytest.mark.parametrize("num_read", [0, 1, 3])
def test_a_forgotten_stream_is_cancelled(engine, fresh, num_read):
    stream = engine.stream(prompt(9), **SETTINGS)
    for _ in range(num_read):
        next(stream)
    del stream
    gc.collect()
    assert engine.loop.is_idle
    assert_serves(engine, fresh)


def test_a_stream_waiting_in_the_queue_can_be_closed(engine, fresh):
    running = [engine.stream(prompt(5), **SETTINGS) for _ in range(4)]
    for stream in running:
        next(stream)
    waiting = engine.stream(prompt(9), **SETTINGS)
    assert engine.stats()["waiting"] == 1
    waiting.close()
    assert engine.stats()["waiting"] == 0
    for stream in running:
        stream.close()
    assert_serves(engine, fresh)


def test_a_consumer_that_raises_leaves_nothing_behind(engine, fresh):
    def consume():
        for number, _ in enumerate(engine.stream(prompt(9), **SETTINGS)):
            if number == 3:
                raise KeyError("the consumer's own")

    with pytest.raises(KeyError, match="the consumer's own"):
        consume()
    gc.collect()
    assert engine.loop.is_idle
    assert_serves(engine, fresh)


@pytest.mark.timeout(120)
def test_a_stream_dropped_by_the_garbage_collector_amid_a_step(engine, fresh, monkeypatch):
    # given a forgotten stream in a reference cycle, collected while another request's step runs
    stream = engine.stream(prompt(40), **SETTINGS)
    next(stream)
    cycle = [stream]
    cycle.append(cycle)
    del stream, cycle
    step, collected = engine.loop._steps.round, []

    def collecting(params, state, *args):
        result = step(params, state, *args)
        if not collected:
            collected.append(gc.collect())
        return result

    steps = dataclasses.replace(engine.loop._steps, round=collecting)
    monkeypatch.setattr(engine.loop, "_steps", steps)
    assert engine.generate(prompt(9), seed=9, **SETTINGS).ids == fresh[9]
    assert collected
    assert engine.loop.is_idle
    monkeypatch.undo()
    assert_serves(engine, fresh)


def test_cancelling_one_of_several_leaves_the_others_alone(engine, fresh):
    params = sampling_from(engine.config.sampling, **SETTINGS)
    requests = {n: engine.loop.submit(prompt(n), sampling_from(params, seed=n)) for n in fresh}
    for _ in range(3):
        engine.loop.step()
    engine.loop.cancel(requests[5])
    assert requests[5].is_finished
    result = requests[5].result()
    assert result.finish_reason == "cancelled"
    assert result.ids == fresh[5][: len(result.ids)]
    engine.loop.run(list(requests.values()))
    del requests[5]
    assert {n: r.result().ids for n, r in requests.items()} == {
        n: ids for n, ids in fresh.items() if n != 5
    }


def test_cancelling_twice_or_after_the_end_changes_nothing(engine):
    request = engine.loop.submit(prompt(5), sampling_from(engine.config.sampling, max_tokens=3))
    engine.loop.run([request])
    want = request.result().outputs
    engine.loop.cancel(request)
    engine.loop.cancel(request)
    assert request.result().outputs == want


# A step that fails.


@pytest.mark.parametrize("error", [RuntimeError("out of memory"), KeyboardInterrupt()])
@pytest.mark.parametrize(
    ("name", "at"), [("prefill", 1), ("prefill", 2), ("first", 1), ("round", 1), ("round", 6)]
)
def test_a_failing_step_is_told_and_forgotten(engine, fresh, break_step, name, at, error):
    before = engine.stats()
    break_step(name, error, at)
    with pytest.raises(type(error)):
        engine.generate(prompt(40), seed=40, **SETTINGS)
    assert engine.loop.is_idle
    assert engine.stats()["restarts"] == before["restarts"] + 1
    assert engine.stats()["cache_bytes"] == before["cache_bytes"]
    assert_serves(engine, fresh)


@pytest.mark.parametrize("name", ["fork", "admit", "set_rows", "release"])
def test_small_steps_may_fail_too(engine, fresh, break_step, name):
    break_step(name, RuntimeError("broken"))
    with pytest.raises(RuntimeError, match="broken"):
        engine.generate(prompt(9), n=2, logit_bias={320: 1.0}, **SETTINGS)
    assert engine.loop.is_idle
    assert_serves(engine, fresh)


@pytest.mark.parametrize(("name", "at"), [("prefill", 1), ("round", 4)])
def test_a_stream_half_read_continues_with_the_same_ids(engine, fresh, break_step, name, at):
    # given two streams, one half read and one in the queue's front, when another call fails
    half = engine.stream(prompt(21), seed=21, **SETTINGS)
    other = engine.stream(prompt(5), seed=5, **SETTINGS)
    ids = [i for _ in range(4) for i in next(half).ids]
    break_step(name, KeyboardInterrupt(), at)
    with pytest.raises(KeyboardInterrupt):
        engine.generate([prompt(9), prompt(2)], **SETTINGS)
    ids += [i for delta in half for i in delta.ids]
    assert tuple(ids) == fresh[21]
    assert tuple(i for delta in other for i in delta.ids) == fresh[5]
    assert_serves(engine, fresh)


def test_samples_of_one_prompt_and_penalties_survive_a_failure(engine, break_step):
    settings = SETTINGS | {"seed": 3, "repetition_penalty": 1.4, "logit_bias": {320: 3.0}}
    params = sampling_from(engine.config.sampling, n=3, **settings)
    want = engine.generate(prompt(9), params).outputs
    request = engine.loop.submit(prompt(9), params)
    break_step("round", RuntimeError("broken"), at=5)
    with pytest.raises(RuntimeError, match="broken"):
        engine.loop.run([request])
    engine.loop.run([request])
    assert request.result().outputs == want


def test_a_failing_score_gives_its_slot_back(engine, fresh, break_step):
    break_step("score", RuntimeError("broken"))
    with pytest.raises(RuntimeError, match="broken"):
        engine.score(prompt(9))
    assert engine.loop._scheduler.num_free == 4
    assert len(engine.score(prompt(9))) == 9
    assert_serves(engine, fresh)


def test_a_failure_while_tokens_are_delivered_loses_none(engine, fresh, monkeypatch):
    stream = engine.stream(prompt(21), seed=21, **SETTINGS)
    ids = list(next(stream).ids)
    with monkeypatch.context() as patch:
        patch.setattr(jax, "device_get", lambda _: (_ for _ in ()).throw(KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            engine.generate(prompt(9), **SETTINGS)
    ids += [i for delta in stream for i in delta.ids]
    assert tuple(ids) == fresh[21]
    assert_serves(engine, fresh)


# Queues.


def test_a_full_queue_refuses_and_then_recovers(engine, fresh):
    # given four slots and a queue of five
    streams = [engine.stream(prompt(5), **SETTINGS) for _ in range(9)]
    with pytest.raises(ValueError, match=r"engine.max_queue=5: 9 samples are waiting, 1 more"):
        engine.stream(prompt(5), **SETTINGS)
    with pytest.raises(ValueError, match=r"1 more do not fit"):
        engine.loop.submit(prompt(5), engine.config.sampling)
    for stream in streams:
        stream.close()
    assert_serves(engine, fresh)


def test_a_batch_larger_than_the_queue_is_served_in_order(engine):
    prompts = [prompt(2 + n % 30, seed=n) for n in range(40)]
    results = engine.generate(prompts, max_tokens=3)
    assert [list(result.prompt_ids) for result in results] == prompts


def test_a_batch_waits_for_a_stream_that_fills_the_queue(engine, fresh):
    streams = [engine.stream(prompt(5), seed=5, **SETTINGS) for _ in range(9)]
    assert engine.generate(prompt(9), seed=9, **SETTINGS).ids == fresh[9]
    for stream in streams:
        assert tuple(i for delta in stream for i in delta.ids) == fresh[5]


def test_more_samples_than_slots_and_queue_are_refused(engine, fresh):
    with pytest.raises(ValueError, match=r"engine.max_queue=5"):
        engine.generate(prompt(5), n=10, **SETTINGS)
    assert engine.loop.is_idle
    assert_serves(engine, fresh)


# Numbers that are none.


def test_logits_that_are_not_numbers_end_the_request_in_words(scripted):
    # given a hook that returns NaN from a position on
    want = scripted.generate(prompt(9), max_tokens=8, ignore_eos=True).ids
    for settings in ({"temperature": 0.0}, {"temperature": 1.0, "logprobs": 0}):
        with pytest.raises(FloatingPointError, match=f"position {BROKEN} are NaN"):
            scripted.generate(prompt(BROKEN - 3), ignore_eos=True, **settings)
        assert scripted.loop.is_idle
        assert scripted.generate(prompt(9), max_tokens=8, ignore_eos=True).ids == want


def test_a_hook_that_rules_out_every_token_is_told():
    silent = make_engine(
        hook=lambda logits, _: logits - jnp.inf, max_batch=1, prefill_chunks=[4], max_context=8
    )
    with pytest.raises(FloatingPointError, match=r"position 1 .* leave no token"):
        silent.generate("")


def test_what_else_was_asked_is_finished_and_comes_with_the_error(scripted):
    # given a batch whose second prompt runs into NaN while the first and third do not
    prompts = [prompt(60), prompt(BROKEN - 3), prompt(9)]
    settings = {"max_tokens": 14, "ignore_eos": True}
    alone = [scripted.generate(ids, **settings) for ids in (prompts[0], prompts[2])]
    restarts = scripted.stats()["restarts"]
    with pytest.raises(FloatingPointError, match=f"position {BROKEN} are NaN") as error:
        scripted.generate(prompts, **settings)
    first, broken, last = error.value.results
    assert [first.ids, last.ids] == [result.ids for result in alone]
    assert (len(broken.ids), broken.finish_reason) == (3, "error")
    assert f"position {BROKEN}" in broken.outputs[0].error
    assert scripted.stats()["restarts"] == restarts
    # and nobody continues from the slot of the broken one
    before = scripted.stats()["reused_tokens"]
    with pytest.raises(FloatingPointError):
        scripted.generate([*broken.prompt_ids, *broken.ids], **settings)
    assert scripted.stats()["reused_tokens"] == before


def test_a_stream_tells_what_it_has_before_the_error(scripted):
    stream = scripted.stream(prompt(BROKEN - 3), ignore_eos=True)
    deltas = [next(stream) for _ in range(4)]
    assert [len(delta.ids) for delta in deltas] == [1, 1, 1, 0]
    assert deltas[-1].finish_reason == "error"
    with pytest.raises(FloatingPointError, match=f"position {BROKEN} are NaN"):
        next(stream)


def test_a_neighbour_of_such_a_request_is_served(scripted):
    want = scripted.generate(prompt(60), max_tokens=14, ignore_eos=True).ids
    stream = scripted.stream(prompt(60), max_tokens=14, ignore_eos=True)
    ids = list(next(stream).ids)
    with pytest.raises(FloatingPointError):
        scripted.generate(prompt(BROKEN - 3), ignore_eos=True)
    ids += [i for delta in stream for i in delta.ids]
    assert tuple(ids) == want


def test_the_nan_checker_finds_nothing_in_a_sound_run_and_breaks_nothing(scripted):
    want = [r.ids for r in scripted.generate([prompt(60), prompt(63)], max_tokens=8)]
    jax.config.update("jax_debug_nans", True)
    try:
        # two slots of unequal length, one of them idle at the end
        assert [r.ids for r in scripted.generate([prompt(60), prompt(63)], max_tokens=8)] == want
        with pytest.raises(FloatingPointError):
            scripted.generate(prompt(BROKEN - 2), ignore_eos=True)
        assert [r.ids for r in scripted.generate([prompt(60), prompt(63)], max_tokens=8)] == want
    finally:
        jax.config.update("jax_debug_nans", False)
    for result in scripted.generate([prompt(60), prompt(63)], max_tokens=8, ignore_eos=True):
        assert_greedy(result, 8)
