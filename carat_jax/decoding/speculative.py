"""Which drafted tokens stand: the rules of acceptance, apart from any model.

Point-mass drafts (an argmax, an n-gram): the target draws its own token at every position, with
that position's key, and a draft stands while it equals the draw. The committed tokens are then the
target's own draws, so the output is the one plain decoding would have given, id for id.

Sampled drafts (Leviathan et al. 2023, Chen et al. 2023): a draft x ~ q stands with probability
min(1, p(x) / q(x)); at the first that falls, a token is drawn from the residual max(0, p - q). The
law of the output is exactly p; the ids may differ from those of plain decoding.

Fixed shapes throughout: B slots, M drafts, M + 1 rows, V tokens.
"""

import jax
import jax.numpy as jnp

from carat_jax.array_types import Array, Bool, Float, Int


def num_standing(stands: Bool[Array, "B M"], num_drafts: Int[Array, "B"]) -> Int[Array, "B"]:
    """How many drafts stand before the first that falls, of the `num_drafts` there are."""
    real = jnp.arange(stands.shape[1]) < num_drafts[:, None]
    return jnp.sum(jnp.cumprod(stands & real, axis=1, dtype=jnp.int32), axis=1)


def accept_points(
    drafts: Int[Array, "B M"], draws: Int[Array, "B rows"], num_drafts: Int[Array, "B"]
) -> Int[Array, "B"]:
    """Accepted drafts when each must equal the target's own draw at its place.

    Row t of `draws` is the target's token for the place of draft t; the last one is the bonus.
    """
    return num_standing(drafts == draws[:, : drafts.shape[1]], num_drafts)


def accept_sampled(
    drafts: Int[Array, "B M"],
    draft_logits: Float[Array, "B M V"],
    target_logits: Float[Array, "B rows V"],
    num_drafts: Int[Array, "B"],
    uniforms: Float[Array, "B M"],
    noise: Float[Array, "B rows V"],
) -> tuple[Int[Array, "B"], Int[Array, "B rows"]]:
    """Accepts drafts that were drawn from `draft_logits` against the law of `target_logits`.

    Args:
      drafts: drawn tokens.
      draft_logits: unnormalised log-law q each was drawn from, after temperature and truncation.
      target_logits: the target's p at the same places and one more, processed alike.
      num_drafts: how many drafts are real.
      uniforms: in [0, 1), independent of everything else.
      noise: Gumbel noise of each place.

    Returns:
      Accepted drafts of each slot, and the tokens to commit: row t is the draft where it stands,
      and a draw from the residual where it falls, or from p past the last draft.
    """
    num_places = drafts.shape[1]
    p = jax.nn.softmax(target_logits[:, : num_places + 1], axis=-1)
    q = jax.nn.softmax(draft_logits, axis=-1)
    real = jnp.arange(num_places) < num_drafts[:, None]
    # Past the last draft nothing was proposed: q = 0 leaves p itself as the residual.
    q = jnp.pad(jnp.where(real[..., None], q, 0), ((0, 0), (0, 1), (0, 0)))
    at = drafts[..., None]
    p_draft = jnp.take_along_axis(p[:, :-1], at, axis=-1)[..., 0]
    q_draft = jnp.take_along_axis(q[:, :-1], at, axis=-1)[..., 0]
    accepted = num_standing(uniforms * q_draft < p_draft, num_drafts)
    residual = jnp.maximum(p - q, 0)
    # p == q up to rounding leaves no residual; there a draft cannot fall either.
    residual = jnp.where(jnp.sum(residual, axis=-1, keepdims=True) > 0, residual, p)
    redrawn = jnp.argmax(jnp.log(residual) + noise[:, : num_places + 1], axis=-1)
    row = jnp.arange(num_places + 1)
    padded = jnp.pad(drafts, ((0, 0), (0, 1)))
    tokens = jnp.where(row < accepted[:, None], padded, redrawn).astype(jnp.int32)
    return accepted, tokens


def simulated_acceptance(
    positions: Int[Array, "B"], num_drafts: Int[Array, "B"], mean_length: float
) -> Int[Array, "B"]:
    """Accepted drafts that make rounds commit `mean_length` tokens on average, bonus included.

    For measuring speed without trained weights: what is generated means nothing. The count is the
    mean rounded up or down by a hash of the position, so all slots do not move in step.
    """
    mean = mean_length - 1
    hashed = (positions.astype(jnp.uint32) * jnp.uint32(2654435761)) >> 8
    dither = hashed.astype(jnp.float32) / 2**24
    return jnp.minimum(jnp.floor(mean + dither).astype(jnp.int32), num_drafts)
