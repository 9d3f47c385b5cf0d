"""What a sampler keeps, draws and reports, against laws computed by hand in float64.

Draws are judged by chi-square with fixed seeds: a law that is right passes always, and one that is
off by the size of a forgotten temperature or cut fails by orders of magnitude.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from carat_jax.decoding import sampling
from tests.oracle import log_softmax, softmax

LOG_PROBS = np.log([0.4, 0.3, 0.2, 0.1])


jit_draw = jax.jit(sampling.draw)
jit_law = jax.jit(sampling.drawing_logits)


def state_of(num_rows: int, vocab: int, **fields) -> sampling.SamplingState:
    """Rows with the given fields: one value for all of them, or one each."""
    empty = jax.eval_shape(lambda: sampling.empty_sampling(num_rows, vocab))
    off = {"temperature": 1.0, "top_p": 1.0, "repetition_penalty": 1.0}

    def rows(name: str) -> np.ndarray:
        like = getattr(empty, name)
        value = np.asarray(fields.get(name, off.get(name, 0)), like.dtype)
        return np.broadcast_to(value, like.shape)

    names = [field.name for field in dataclasses.fields(empty)]
    return sampling.SamplingState(**{name: rows(name) for name in names})


def kept(logits, **fields) -> list[int]:
    """Ids that remain in the drawing law of one row."""
    row = np.asarray(logits, np.float32)[None]
    law = jit_law(row, state_of(1, row.shape[1], **fields))
    return np.flatnonzero(np.isfinite(np.asarray(law[0]))).tolist()


def draws(logits, num_draws: int, **fields) -> np.ndarray:
    """Independent draws of one law: a seed each."""
    rows = np.broadcast_to(np.asarray(logits, np.float32), (num_draws, len(logits)))
    state = state_of(num_draws, len(logits), seed=np.arange(num_draws), **fields)
    return np.asarray(jit_draw(rows, state, np.full(num_draws, 5)))


def chi_square_p(counts, probs) -> float:
    """Upper tail of the chi-square statistic, by the Wilson-Hilferty approximation."""
    probs = np.asarray(probs)
    assert not counts[probs == 0].any()
    live = probs > 0
    expected = counts.sum() * probs[live]
    statistic = ((counts[live] - expected) ** 2 / expected).sum()
    freedom = live.sum() - 1
    spread = 2 / (9 * freedom)
    z = ((statistic / freedom) ** (1 / 3) - (1 - spread)) / math.sqrt(spread)
    return 0.5 * math.erfc(z / math.sqrt(2))


# Cuts.


@pytest.mark.parametrize(
    ("top_p", "want"),
    [
        (1e-9, [0]),
        (0.39, [0]),
        (0.4, [0]),
        (0.41, [0, 1]),
        (0.6, [0, 1]),
        (0.7, [0, 1]),
        (0.71, [0, 1, 2]),
        (0.9, [0, 1, 2]),
        (0.95, [0, 1, 2, 3]),
        (1.0, [0, 1, 2, 3]),
    ],
)
def test_top_p_keeps_the_fewest_likeliest_that_reach_it(top_p, want):
    assert kept(LOG_PROBS, top_p=top_p) == want
    # whatever the order of the vocabulary, and a constant in the logits
    assert kept(LOG_PROBS[::-1] + 20, top_p=top_p) == sorted(3 - i for i in want)


@pytest.mark.parametrize(
    ("top_k", "want"), [(0, [0, 1, 2, 3]), (1, [0]), (2, [0, 1]), (4, [0, 1, 2, 3])]
)
def test_top_k_keeps_k_and_zero_keeps_all(top_k, want):
    assert kept(LOG_PROBS, top_k=top_k) == want


def test_top_k_past_the_vocabulary_keeps_all():
    assert kept(LOG_PROBS, top_k=2**31 - 1) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("min_p", "want"),
    [(0.0, [0, 1, 2, 3]), (0.24, [0, 1, 2, 3]), (0.26, [0, 1, 2]), (0.6, [0, 1]), (1.0, [0])],
)
def test_min_p_is_a_share_of_the_likeliest(min_p, want):
    assert kept(LOG_PROBS, min_p=min_p) == want


def test_top_p_is_a_share_of_what_top_k_left():
    # given three kept with probabilities 4/9, 3/9, 2/9: two of them reach 0.75
    assert kept(LOG_PROBS, top_k=3, top_p=0.75) == [0, 1]
    assert kept(LOG_PROBS, top_p=0.75) == [0, 1, 2]


def test_cuts_act_on_the_law_after_temperature():
    # given temperature 1/2, which squares the probabilities: 16, 9, 4, 1 of 30
    assert kept(LOG_PROBS, temperature=0.5, top_p=0.8) == [0, 1]
    assert kept(LOG_PROBS, temperature=0.5, top_p=0.85) == [0, 1, 2]
    assert kept(LOG_PROBS, temperature=0.5, min_p=0.2) == [0, 1, 2]


def test_ties_at_a_cut_go_to_the_lower_id():
    tied = np.log([0.1, 0.3, 0.3, 0.3])
    assert kept(tied, top_k=1) == [1]
    assert kept(tied, top_k=2) == [1, 2]
    assert kept(tied, top_p=0.5) == [1, 2]
    assert kept(tied, temperature=0.0) == [1]
    assert kept([0.0] * 5, top_p=0.6) == [0, 1, 2]


def test_a_million_equal_tokens_do_not_fool_the_running_sum():
    # given so flat a law that float32 sums of its probabilities drift
    vocab = 262_144
    count = len(kept(np.zeros(vocab), top_p=0.5))
    assert abs(count - vocab / 2) < vocab * 1e-4


def test_suppressed_tokens_survive_no_setting():
    logits = np.array([5.0, -np.inf, 3.0, -np.inf])
    assert kept(logits) == [0, 2]
    assert kept(logits, top_k=4, top_p=1.0) == [0, 2]
    assert kept(logits, temperature=1e6) == [0, 2]


def test_rows_do_not_see_each_others_settings():
    rows = np.stack([LOG_PROBS] * 4).astype(np.float32)
    state = state_of(
        4, 4, temperature=[1, 0, 1, 1], top_k=[0, 0, 2, 0], top_p=[1, 1, 1, 0.4], min_p=0
    )
    law = np.asarray(jit_law(rows, state))
    assert np.isfinite(law).sum(axis=1).tolist() == [4, 1, 2, 1]


@pytest.mark.parametrize("temperature", [0.0, 1e-9, 1e-6, 1e-5, 1e-4, 1e-3])
@pytest.mark.parametrize("size", [1.0, 1e30])
def test_cold_draws_are_the_argmax_and_finite(temperature, size):
    logits = np.array([0.1, 0.5, 0.4, -0.3]) * size
    law = jit_law(np.asarray(logits, np.float32)[None], state_of(1, 4, temperature=temperature))
    assert not np.isnan(np.asarray(law)).any()
    assert law[0, 1] == 0
    assert (draws(logits, 200, temperature=temperature) == 1).all()


# Draws.


@pytest.mark.parametrize(
    ("fields", "probs"),
    [
        ({}, [0.4, 0.3, 0.2, 0.1]),
        ({"temperature": 0.5}, np.array([16, 9, 4, 1]) / 30),
        ({"temperature": 2.0}, np.sqrt([0.4, 0.3, 0.2, 0.1]) / np.sqrt([0.4, 0.3, 0.2, 0.1]).sum()),
        ({"top_k": 3}, np.array([4, 3, 2, 0]) / 9),
        ({"top_p": 0.6}, np.array([4, 3, 0, 0]) / 7),
        ({"min_p": 0.4}, np.array([4, 3, 2, 0]) / 9),
        ({"temperature": 0.5, "top_k": 3, "top_p": 0.8}, np.array([16, 9, 0, 0]) / 25),
    ],
)
def test_draws_follow_the_exact_law(fields, probs):
    counts = np.bincount(draws(LOG_PROBS, 20_000, **fields), minlength=4)
    assert chi_square_p(counts, probs) > 1e-4


def test_the_judge_of_draws_rejects_a_law_that_is_slightly_off():
    counts = np.bincount(draws(LOG_PROBS, 20_000, temperature=1.1), minlength=4)
    assert chi_square_p(counts, [0.4, 0.3, 0.2, 0.1]) < 1e-6


@pytest.mark.parametrize("varied", ["seed", "sample", "position"])
def test_draws_are_independent_over_seeds_samples_and_positions(varied):
    # given pairs that differ by one in one of the three, all else equal
    num = 20_000
    rows = np.broadcast_to(LOG_PROBS.astype(np.float32), (num, 4))
    index = np.arange(num)
    keys = {"seed": 7, "sample": 3, "position": 11} | {varied: index}
    state = state_of(num, 4, seed=keys["seed"], sample=keys["sample"])
    tokens = np.asarray(jit_draw(rows, state, np.broadcast_to(keys["position"], num)))
    pairs = np.bincount(tokens[:-1:2] * 4 + tokens[1::2], minlength=16)
    law = softmax(LOG_PROBS)
    assert chi_square_p(pairs, np.outer(law, law).ravel()) > 1e-4


def test_a_draw_depends_on_seed_sample_and_position_alone():
    logits = np.random.default_rng(0).normal(size=(1, 64)).astype(np.float32)
    alone = jit_draw(logits, state_of(1, 64, seed=9, sample=2), np.array([30]))
    rows = np.concatenate([logits * 2, logits] + [logits] * 18)
    seeds, temperatures = [9, 9, *range(10, 28)], [1, 1, *[0.5] * 18]
    state = state_of(20, 64, seed=seeds, sample=2, temperature=temperatures)
    among = jit_draw(rows, state, np.full(20, 30))
    assert among[1] == alone[0]
    assert len(set(np.asarray(among).tolist())) > 8


def test_the_largest_seed_is_a_seed_of_its_own():
    logits = np.zeros((3, 1000), np.float32)
    state = state_of(3, 1000, seed=np.array([0, 2**32 - 1, 2**31], np.uint32))
    assert len(set(jit_draw(logits, state, np.full(3, 4)).tolist())) == 3


# The reported law.


def test_repetition_penalty_divides_positive_and_multiplies_negative_logits_of_seen_tokens():
    logits = jnp.asarray([[2.0, -2.0, 3.0, -3.0, 0.0], [2.0, -2.0, 3.0, -3.0, 0.0]])
    seen = [True, True, False, False, True]
    state = state_of(2, 5, repetition_penalty=[2.0, 1.0], seen=seen)
    got = sampling.allowed_logits(logits, state, jnp.zeros(2, jnp.int32))
    np.testing.assert_array_equal(got, [[1, -4, 3, -3, 0], [2, -2, 3, -3, 0]])


def test_hook_sees_penalised_logits_and_bias_comes_last():
    bias = [0.0, -np.inf, 5.0]
    state = state_of(1, 3, repetition_penalty=2.0, seen=[True, False, False], bias=bias)
    got = sampling.allowed_logits(
        jnp.asarray([[4.0, 1.0, 1.0]]),
        state,
        jnp.asarray([17]),
        hook=lambda logits, positions: logits * 10 + positions[:, None],
    )
    np.testing.assert_array_equal(got, [[37, -np.inf, 32]])


def test_log_probabilities_are_the_log_softmax_and_its_best():
    logits = np.random.default_rng(0).normal(0, 3, (5, 40)).astype(np.float32)
    logits[:, [3, 7]] = -np.inf
    want = log_softmax(logits.astype(np.float64))
    tokens = jnp.asarray([0, 1, 39, 20, 3])
    chosen, ids, top = sampling.log_probabilities(jnp.asarray(logits), tokens, 6)
    np.testing.assert_allclose(chosen[:4], want[np.arange(4), tokens[:4]], atol=1e-5)
    assert chosen[4] == -np.inf
    np.testing.assert_allclose(top, -np.sort(-want, axis=1)[:, :6], atol=1e-5)
    np.testing.assert_array_equal(ids, np.argsort(-want, axis=1)[:, :6])
    everything = sampling.log_probabilities(jnp.asarray(logits), tokens, 40)[2]
    np.testing.assert_allclose(np.exp(everything).sum(axis=1), 1, atol=1e-5)
