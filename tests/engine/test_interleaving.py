"""A long prompt is prefilled between the rounds of those that run, and holds them up by a bound."""

import dataclasses
import time

import jax
import pytest

from carat_jax.config import sampling_from
from tests.engine.toy_engine import assert_greedy, make_engine, prompt

SETTINGS = {"temperature": 0.0, "ignore_eos": True}
BUDGET = 8


@pytest.fixture(scope="module")
def engine():
    """Three slots; chunks of 8 and 32, of which only the small one fits between two rounds."""
    return make_engine(max_batch=3, prefill_chunks=[8, 32], prefill_budget=BUDGET)


@pytest.fixture
def calls(engine, monkeypatch):
    """The steps that are dispatched: "round", or the size of a prefill chunk."""
    seen = []

    def watched(name, note):
        step = getattr(engine.loop._steps, name)

        def run(*args):
            seen.append(note(args))
            return step(*args)

        return run

    steps = dataclasses.replace(
        engine.loop._steps,
        round=watched("round", lambda _: "round"),
        prefill=watched("prefill", lambda args: args[2].shape[1]),
    )
    monkeypatch.setattr(engine.loop, "_steps", steps)
    return seen


def submit(engine, ids, **settings):
    params = sampling_from(engine.config.sampling, **SETTINGS, **settings)
    return engine.loop.submit(ids, params)


def test_a_long_prompt_lets_a_round_pass_after_each_chunk(engine, calls):
    running = submit(engine, prompt(5), max_tokens=30)
    for _ in range(3):
        engine.loop.step()
    del calls[:]
    late = submit(engine, prompt(61), max_tokens=5)
    engine.loop.run([running, late])
    assert calls[:17] == [8, "round"] * 8 + ["round"]
    assert set(calls[17:]) == {"round"}
    assert_greedy(running.result(), 30)
    assert_greedy(late.result(), 5)


def test_alone_a_prompt_is_prefilled_in_the_largest_chunks(engine, calls):
    request = submit(engine, prompt(70), max_tokens=1)
    engine.loop.run([request])
    assert calls == [32, 32, 8]
    assert_greedy(request.result(), 1)


def test_a_stream_goes_on_while_others_are_prefilled(engine):
    stream = engine.stream(prompt(9), max_tokens=20, **SETTINGS)
    ids = list(next(stream).ids)
    late = [submit(engine, prompt(60, seed=s), max_tokens=3) for s in (1, 2)]
    while not any(request.samples[0].ids for request in late):
        ids += next(stream).ids
    # sixteen gaps hold both prompts; the first of them was read after eight
    assert 8 <= len(ids) <= 11
    ids += [i for delta in stream for i in delta.ids]
    assert tuple(ids) == engine.generate(prompt(9), max_tokens=20, **SETTINGS).ids
    engine.loop.run(late)
    for request in late:
        assert_greedy(request.result(), 3)


@pytest.mark.parametrize("num_samples", [1, 2])
def test_cancelled_in_the_middle_of_its_prefill(engine, num_samples):
    running = submit(engine, prompt(5), max_tokens=12)
    engine.loop.step()
    late = submit(engine, prompt(61), max_tokens=5, n=num_samples)
    engine.loop.step()
    engine.loop.step()
    stats = engine.stats()
    assert (stats["prefilling"], stats["running"]) == (num_samples, 1)
    engine.loop.cancel(late)
    assert engine.stats()["prefilling"] == 0
    assert {output.finish_reason for output in late.result().outputs} == {"cancelled"}
    engine.loop.run([running])
    assert_greedy(running.result(), 12)
    # and the half-filled slot serves: the same prompt continues from it, another does not
    before = engine.stats()["reused_tokens"]
    assert_greedy(engine.generate(prompt(61), max_tokens=5, **SETTINGS), 5)
    assert engine.stats()["reused_tokens"] - before == 16
    for length in (21, 30, 40):
        assert_greedy(engine.generate(prompt(length), max_tokens=5, **SETTINGS), 5)


def test_a_failure_in_the_middle_of_a_prefill_changes_no_token(engine, monkeypatch):
    running = submit(engine, prompt(5), max_tokens=12)
    engine.loop.step()
    late = submit(engine, prompt(61), max_tokens=5)
    engine.loop.step()
    with monkeypatch.context() as patch:

        def broken(*args):
            raise RuntimeError("broken")

        patch.setattr(
            engine.loop, "_steps", dataclasses.replace(engine.loop._steps, prefill=broken)
        )
        with pytest.raises(RuntimeError, match="broken"):
            engine.loop.step()
    engine.loop.run([running, late])
    assert_greedy(running.result(), 12)
    assert_greedy(late.result(), 5)


@pytest.mark.parametrize(("logprobs", "num_arrays"), [(None, 1), (0, 4)])
def test_a_step_is_one_copy_to_the_host(engine, monkeypatch, logprobs, num_arrays):
    copied, get = [], jax.device_get

    def counted(tree):
        copied.append(len(jax.tree.leaves(tree)))
        return get(tree)

    monkeypatch.setattr(jax, "device_get", counted)
    before, started = engine.stats(), time.perf_counter()
    requests = [submit(engine, prompt(n), max_tokens=6, logprobs=logprobs) for n in (3, 5)]
    engine.loop.run(requests)
    # each one's first token, and the five rounds of both; the last one may be dropped unread
    assert copied == [num_arrays] * len(copied)
    assert len(copied) <= 2 + 5 + 1
    # and what a step costs is told apart: waiting for the device, and Python
    after, spent = engine.stats(), time.perf_counter() - started
    host, wait = (after[name] - before[name] for name in ("host_seconds", "wait_seconds"))
    assert host > 0
    assert wait > 0
    assert host + wait < spent


def test_a_budget_that_holds_no_chunk_is_refused():
    with pytest.raises(ValueError, match=r"engine.prefill_budget: 7 does not hold .* 8"):
        make_engine(prefill_chunks=[8, 32], prefill_budget=7)
