"""Acceptance rules alone: what stands, and that the law of the output is the target's."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from carat_jax.decoding.speculative import (
    accept_points,
    accept_sampled,
    num_standing,
    simulated_acceptance,
)

V, DRAWS = 16, 50_000
# Upper 1e-4 quantile of chi-square with k degrees of freedom (Wilson-Hilferty).
Z = 3.719


def test_drafts_stand_until_the_first_that_falls_and_only_as_far_as_there_are_any():
    stands = jnp.asarray([[1, 1, 0, 1], [1, 1, 1, 1], [0, 1, 1, 1], [1, 1, 1, 1]], bool)
    num_drafts = jnp.asarray([4, 4, 4, 2])
    assert num_standing(stands, num_drafts).tolist() == [2, 4, 0, 2]


def test_point_drafts_stand_while_they_equal_the_targets_own_draws():
    drafts = jnp.asarray([[5, 6, 7], [5, 6, 7], [9, 6, 7], [5, 6, 7]])
    draws = jnp.asarray([[5, 6, 7, 8], [5, 0, 7, 8], [5, 6, 7, 8], [5, 6, 7, 8]])
    assert accept_points(drafts, draws, jnp.asarray([3, 3, 3, 0])).tolist() == [3, 1, 0, 0]


def _laws(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Target and draft laws of the next token after each token, some tokens cut off in each."""
    rng = np.random.default_rng(seed)
    laws = []
    for cut in (3, 4):
        logits = rng.normal(size=(V, V)) * 1.5
        logits[:, rng.permutation(V)[:cut]] = -np.inf
        laws.append(logits)
    return tuple(laws)


def _first_two_tokens(p_logits, q_logits, bias: float = 1.0) -> np.ndarray:
    """Counts of the first two tokens after token 0, of rounds with two sampled drafts."""
    p_logits, q_logits = jnp.asarray(p_logits), jnp.asarray(q_logits)
    keys = jax.random.split(jax.random.key(7), 5)

    def draw(key, logits):
        return jax.random.categorical(key, logits, axis=-1)

    start = jnp.zeros(DRAWS, jnp.int32)
    first = draw(keys[0], q_logits[start])
    second = draw(keys[1], q_logits[first])
    drafts = jnp.stack([first, second], axis=1).astype(jnp.int32)
    before = jnp.stack([start, first, second], axis=1)
    accepted, tokens = accept_sampled(
        drafts,
        q_logits[before[:, :2]],
        p_logits[before],
        jnp.full(DRAWS, 2),
        jax.random.uniform(keys[2], (DRAWS, 2)) / bias,
        jax.random.gumbel(keys[3], (DRAWS, 3, V)),
    )
    # Where the first draft fell only one token was committed: plain drawing goes on from it.
    plain = draw(keys[4], p_logits[tokens[:, 0]])
    second = jnp.where(accepted > 0, tokens[:, 1], plain)
    return np.bincount(np.asarray(tokens[:, 0] * V + second), minlength=V * V)


def _chi_square_excess(counts: np.ndarray, p_logits: np.ndarray) -> float:
    """How far chi-square lies beyond its 1e-4 quantile, cells pooled to 5 expected counts."""
    p = np.exp(p_logits) / np.exp(p_logits).sum(-1, keepdims=True)
    expected = (p[0][:, None] * p).reshape(-1) * DRAWS
    assert counts[expected == 0].sum() == 0  # cut-off tokens must not appear at all
    big = expected >= 5
    cells = [*zip(expected[big], counts[big], strict=True)]
    if expected[~big].sum() >= 5:
        cells.append((expected[~big].sum(), counts[~big].sum()))
    want, got = np.array(cells).T
    k = len(cells) - 1
    quantile = k * (1 - 2 / (9 * k) + Z * np.sqrt(2 / (9 * k))) ** 3
    return ((got - want) ** 2 / want).sum() - quantile


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_joint_law_of_two_tokens_is_the_targets(seed):
    p_logits, q_logits = _laws(seed)
    assert _chi_square_excess(_first_two_tokens(p_logits, q_logits), p_logits) < 0


def test_an_acceptance_that_is_too_generous_fails_the_same_check():
    p_logits, q_logits = _laws(0)
    counts = _first_two_tokens(p_logits, q_logits, bias=1.3)
    assert _chi_square_excess(counts, p_logits) > 0


def test_a_draft_from_the_targets_own_law_always_stands():
    p_logits, _ = _laws(3)
    p = jnp.asarray(p_logits)[None, :3]
    best = jnp.argmax(p[:, :2], axis=-1).astype(jnp.int32)
    accepted, tokens = accept_sampled(
        best, p[:, :2], p, jnp.asarray([2]), jnp.full((1, 2), 0.999999), jnp.zeros((1, 3, V))
    )
    assert accepted.tolist() == [2]
    assert tokens[0].tolist() == [*best[0].tolist(), int(jnp.argmax(p[0, 2]))]


def test_without_drafts_the_token_is_drawn_from_the_target_alone():
    p_logits, q_logits = _laws(4)
    noise = jax.random.gumbel(jax.random.key(1), (1, 3, V))
    accepted, tokens = accept_sampled(
        jnp.zeros((1, 2), jnp.int32),
        jnp.asarray(q_logits)[None, :2],
        jnp.asarray(p_logits)[None, :3],
        jnp.asarray([0]),
        jnp.zeros((1, 2)),
        noise,
    )
    law = jax.nn.log_softmax(jnp.asarray(p_logits)[0])
    assert accepted.tolist() == [0]
    assert int(tokens[0, 0]) == int(jnp.argmax(law + noise[0, 0]))


def test_simulated_rounds_have_the_mean_that_was_asked_for():
    positions = jnp.arange(20_000)
    accepted = simulated_acceptance(positions, jnp.full(20_000, 3), 2.5)
    assert set(np.unique(accepted)) == {1, 2}
    assert np.mean(np.asarray(accepted) + 1) == pytest.approx(2.5, abs=0.02)
    assert int(simulated_acceptance(positions, jnp.ones(20_000, jnp.int32), 4.0).max()) == 1
