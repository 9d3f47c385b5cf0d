"""Steps that are compiled ahead are the ones that run: afterwards nothing compiles."""

import logging

import pytest

import tests.engine.toy_engine as toys
from carat_jax.config import SamplingParams, sampling_from
from carat_jax.engine.compile_counter import num_compilations
from tests.engine.toy_engine import make_engine, prompt

GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
RICH = sampling_from(GREEDY, temperature=0.7, n=2, logprobs=2, seed=3)
BIASED = sampling_from(GREEDY, logit_bias={310: 2.0}, repetition_penalty=1.2, logprobs=0)


def serve(engine, requests):
    engine.loop.run(made := [engine.loop.submit(*request) for request in requests])
    while not engine.loop.is_idle:
        engine.loop.step()
    return [request.result() for request in made]


@pytest.fixture(scope="module")
def plain():
    """Answers of an engine that compiles at first use, by request."""
    engine = make_engine(max_batch=3, prefill_chunks=[8, 16])
    return lambda request: serve(engine, [request])[0]


@pytest.mark.parametrize(
    "requests",
    [
        [(prompt(5), GREEDY)],
        # a chunk of either size, two samplers and the one that serves both
        [(prompt(20), RICH), (prompt(7), BIASED)],
    ],
    ids=["one", "several"],
)
def test_nothing_compiles_after_the_steps_of_its_requests(requests, plain, caplog):
    engine = make_engine(max_batch=3, prefill_chunks=[8, 16])
    with caplog.at_level(logging.INFO, "carat_jax"):
        engine.loop.compile_ahead(requests)
    said = [record.getMessage() for record in caplog.records]
    assert said[0].startswith("compiling ")
    assert all(f"prefill {size}" in said[0] for size in ([8] if len(requests) == 1 else [8, 16]))
    assert said[1].startswith("compiled in ")
    before = num_compilations()
    found = serve(engine, requests)
    assert num_compilations() == before
    for request, result in zip(requests, found, strict=True):
        assert [out.ids for out in result.outputs] == [o.ids for o in plain(request).outputs]


def test_what_is_compiled_is_not_compiled_again(caplog):
    engine = make_engine(max_batch=1, prefill_chunks=[8])
    engine.loop.compile_ahead([(prompt(5), GREEDY)])
    spent, before = engine.stats()["compile_seconds"], num_compilations()
    assert spent > 0
    caplog.clear()
    engine.loop.compile_ahead([(prompt(6), sampling_from(GREEDY, max_tokens=3))])
    assert (num_compilations(), engine.stats()["compile_seconds"]) == (before, spent)
    assert caplog.records == []


def test_one_token_needs_no_round():
    engine = make_engine(max_batch=1, prefill_chunks=[8])
    ahead, loop = engine.loop._ahead, engine.loop
    one = [(prompt(5), sampling_from(GREEDY, max_tokens=1))]
    names = set(ahead.calls(loop._params, loop._state, one))
    assert names == {"prefill 8", "first greedy", "admit", "release"}
    assert set(ahead.calls(loop._params, loop._state, [])) == {"admit", "release"}


def test_static_key_counts_are_those_a_request_can_reach(monkeypatch):
    # given three separate stages over 64 or 96 keys
    settings = toys.read_settings
    monkeypatch.setattr(
        toys, "read_settings",
        lambda keywords: settings(keywords=keywords | {"attention.verify": "three_stage"}),
    )  # fmt: skip
    engine = make_engine(max_batch=1, prefill_chunks=[32], max_context=96)
    assert engine.loop.rungs == (64, 128)
    ahead, loop = engine.loop._ahead, engine.loop

    def rounds(length, num_tokens):
        request = (prompt(length), sampling_from(GREEDY, max_tokens=num_tokens))
        names = ahead.calls(loop._params, loop._state, [request])
        return {name for name in names if name.startswith("round")}

    assert rounds(10, 20) == {"round greedy over 64 keys"}
    assert rounds(70, 20) == {"round greedy over 128 keys"}
    assert rounds(60, 20) == {"round greedy over 64 keys", "round greedy over 128 keys"}
