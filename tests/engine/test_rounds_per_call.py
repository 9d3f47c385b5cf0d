"""Several rounds in one call of an executable give the ids of one round a call.

Stops, limits, streams and cancellations fall inside a call on purpose.
"""

import jax
import numpy as np
import pytest

from carat_jax.config import SamplingParams, read_settings, sampling_from
from carat_jax.decoding.steps import SamplerKind
from tests.engine.drafter_toys import loop, run, set_script
from tests.engine.test_prefixes import assert_equal
from tests.engine.toy_engine import CONTEXT, prompt
from tests.test_donation import cache_copies

ROUNDS = 4
GREEDY = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True, logprobs=0)


def looped(drafter="none", num_drafts=0, **settings):
    """An engine of several rounds a call, which prefills two chunks before the next."""
    settings |= {"decode__rounds_per_call": ROUNDS, "engine__prefill_budget": 18}
    return loop(drafter, num_drafts, 3, **settings)


def single(ids, params=GREEDY):
    """The answer of one round a call."""
    return run(loop("none"), [ids], params)[0]


@pytest.mark.parametrize("drafter", [("none", 0), ("script", 3)], ids=lambda d: d[0])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_ids_logprobs_and_reasons_are_those_of_single_rounds(drafter, temperature):
    engine = looped(*drafter)
    params = sampling_from(GREEDY, temperature=temperature, seed=3)
    lengths = (3, 9, 21)
    want = [single(prompt(n), params) for n in lengths]
    set_script(
        engine, [[*prompt(n), *r.ids] for n, r in zip(lengths, want, strict=True)], [2, 0, 3]
    )
    for got, alone in zip(run(engine, [prompt(n) for n in lengths], params), want, strict=True):
        assert_equal(got, alone)
    # limits and stops at every place of a call
    text = want[1].ids
    for place in range(1, 2 * ROUNDS):
        limited = sampling_from(params, max_tokens=place)
        stopped = sampling_from(params, stop_token_ids=(text[place],))
        for changed in (limited, stopped):
            alone = single(prompt(9), changed)
            (got,) = run(engine, [prompt(9)], changed)
            assert_equal(got, alone)
            assert got.finish_reason == alone.finish_reason


def test_a_slot_at_its_limit_is_not_written_and_its_neighbour_goes_on():
    engine = looped()
    short = engine.submit(prompt(9), sampling_from(GREEDY, max_tokens=3))
    long = engine.submit(prompt(8), sampling_from(GREEDY, max_tokens=13))
    engine.step()
    # the call that holds the third token of the short one runs four rounds
    lengths = np.asarray(engine._state.bank.lengths)
    assert sorted(lengths.tolist()) == [0, 9 + 2, 8 + ROUNDS]
    engine.run([short, long])
    assert short.result().ids == single(prompt(9)).ids[:3]
    assert long.result().ids == single(prompt(8)).ids[:13]


def test_a_context_that_ends_inside_a_call():
    ids = prompt(CONTEXT - 6)
    (got,) = run(looped(), [ids], sampling_from(GREEDY, max_tokens=50))
    assert (len(got.ids), got.finish_reason) == (6, "length")
    assert got.ids == single(ids, sampling_from(GREEDY, max_tokens=50)).ids


def test_tokens_arrive_a_call_at_a_time_and_can_be_cancelled():
    engine, want = looped(), single(prompt(9))
    request = engine.submit(prompt(9), GREEDY)
    arrived = []
    while len(request.samples[0].ids) < 9:
        engine.step()
        arrived.append(len(request.samples[0].ids))
    assert arrived == [1, 1 + ROUNDS, 1 + 2 * ROUNDS]
    engine.cancel(request)
    assert request.result().ids == want.ids[:9]
    # and the next turn continues from what was delivered
    before = engine.counters.reused_tokens
    history = [*prompt(9), *want.ids[:9], *prompt(4, seed=8)[1:]]
    (got,) = run(engine, [history], GREEDY)
    assert engine.counters.reused_tokens - before == 17
    assert_equal(got, single(history))


def test_the_three_stage_path_has_keys_enough_for_all_rounds():
    # given a prompt whose call of rounds passes the rung of 64 keys
    engine = looped(attention__verify="three_stage")
    (got,) = run(engine, [prompt(60)], GREEDY)
    assert_equal(got, single(prompt(60)))


def test_the_loop_of_rounds_copies_no_cache():
    engine = looped()
    kind = SamplerKind(draws=False, logprobs=False)
    compiled = engine._steps.round.lower(engine._params, engine._state, kind).compile()
    shapes = {leaf.shape for leaf in jax.tree.leaves(engine._state.bank.layers)}
    assert not cache_copies(compiled.as_text(), shapes)


def test_rounds_that_promise_one_verify_pass_are_not_looped():
    with pytest.raises(ValueError, match=r"decode.rounds_per_call: 4 .*uniform_rows=5"):
        read_settings(keywords={"decode": {"rounds_per_call": 4, "uniform_rows": 5}}).build()
