"""From logits to a token: what each slot asked for, as arrays, and pure functions over them.

The order is that of transformers: repetition penalty, the user's hook, bias and suppression;
then, for drawing only, temperature, top-k, top-p, min-p. Log-probabilities are those of the
logits before temperature and truncation, so they sum to one over the tokens that are allowed.

A draw adds Gumbel noise whose key is a function of (seed, sample index, position of the token)
alone: neighbours, slots, batch size and the order of calls never change a result.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from carat_jax.array_types import Array, Bool, Float, Int, Lengths, UInt

# A user's function on the float32 logits `[R, V]` of tokens at `positions` `[R]`, to logits of the
# same shape and type; pure and traceable. Rows of slots that are not in use pass through it too.
LogitsHook = Callable[[Array, Array], Array]

# Below this a temperature is a request for the best token; the division would only lose digits.
_COLDEST = 1e-6


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=[
        *("temperature", "top_k", "top_p", "min_p", "repetition_penalty"),
        *("seed", "sample", "bias", "seen"),
    ],
    meta_fields=[],
)
@dataclasses.dataclass(frozen=True)
class SamplingState:
    """How each slot draws. Rows of slots that are not in use mean nothing.

    Attributes:
      temperature: 0 draws the most probable token.
      top_k: keep the k most probable tokens; 0 keeps all.
      top_p: keep the smallest set of most probable tokens with at least this mass.
      min_p: drop tokens less probable than this share of the most probable one.
      repetition_penalty: divides positive and multiplies negative logits of tokens seen; 1 is off.
      seed, sample: the request's seed and which of its samples this is.
      bias: added to the logits, `[B, V]`; -inf suppresses a token.
      seen: tokens of the prompt and the output so far, `[B, V]`; read where the penalty is on.
    """

    temperature: Float[Array, "B"]
    top_k: Int[Array, "B"]
    top_p: Float[Array, "B"]
    min_p: Float[Array, "B"]
    repetition_penalty: Float[Array, "B"]
    seed: UInt[Array, "B"]
    sample: Int[Array, "B"]
    bias: Float[Array, "B V"]
    seen: Bool[Array, "B V"]


def empty_sampling(num_slots: int, vocab_size: int) -> SamplingState:
    """Greedy rows."""
    shape = (num_slots,)
    return SamplingState(
        temperature=jnp.zeros(shape, jnp.float32),
        top_k=jnp.zeros(shape, jnp.int32),
        top_p=jnp.ones(shape, jnp.float32),
        min_p=jnp.zeros(shape, jnp.float32),
        repetition_penalty=jnp.ones(shape, jnp.float32),
        seed=jnp.zeros(shape, jnp.uint32),
        sample=jnp.zeros(shape, jnp.int32),
        bias=jnp.zeros((num_slots, vocab_size), jnp.float32),
        seen=jnp.zeros((num_slots, vocab_size), bool),
    )


def allowed_logits(
    logits: Float[Array, "B V"],
    state: SamplingState,
    positions: Lengths,
    hook: LogitsHook | None = None,
    penalise: bool = True,
) -> Float[Array, "B V"]:
    """Logits after repetition penalty, hook, bias and suppression: the law that is reported."""
    if penalise:
        penalty = state.repetition_penalty[:, None]
        logits = jnp.where(
            state.seen, jnp.where(logits > 0, logits / penalty, logits * penalty), logits
        )
    if hook is not None:
        given = f"{logits.dtype}{list(logits.shape)}"
        logits = jnp.asarray(hook(logits, positions))
        if (made := f"{logits.dtype}{list(logits.shape)}") != given:
            raise ValueError(f"logits_hook: it made {made} out of logits {given}")
    return logits + state.bias


def drawing_logits(logits: Float[Array, "B V"], state: SamplingState) -> Float[Array, "B V"]:
    """Logits of the law that tokens are drawn from: scaled by temperature, -inf where cut off.

    Ties at a cut are broken by the lower token id. Rows of temperature 0 are cut to the best token.
    """
    greedy = (state.temperature < _COLDEST)[:, None]
    # Relative to the best token the quotient cannot overflow, however cold it is.
    best = jnp.max(logits, axis=-1, keepdims=True)
    scaled = (logits - best) / jnp.maximum(state.temperature, _COLDEST)[:, None]
    order = jnp.argsort(-scaled, axis=-1, stable=True)
    ranked = jnp.take_along_axis(scaled, order, axis=-1)
    rank = jnp.arange(logits.shape[-1])
    top_k = jnp.where(greedy, 1, jnp.where(state.top_k > 0, state.top_k, rank.size)[:, None])
    keep = rank < top_k
    probs = jax.nn.softmax(jnp.where(keep, ranked, -jnp.inf), axis=-1)
    before = jnp.cumsum(probs, axis=-1) - probs
    # The mass before a token is a rounded sum: a millionth keeps 0.4 from falling short of 0.4.
    keep &= (before < state.top_p[:, None] * (1 - 1e-6)) | (rank == 0)
    keep &= probs >= state.min_p[:, None] * probs[:, :1]
    rows = jnp.arange(logits.shape[0])[:, None]
    kept = jnp.zeros(logits.shape, bool).at[rows, order].set(keep, unique_indices=True)
    return jnp.where(kept, scaled, -jnp.inf)


# What a position's randomness is for: the target's own draw, a sampled draft, and its acceptance.
OWN, DRAFT, ACCEPT = 0, 1, 2


def keys(state: SamplingState, positions: Lengths, purpose: int = OWN) -> Array:
    """A key for each slot's token at `positions`."""

    def key(seed: Array, sample: Array, position: Array) -> Array:
        own = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), sample), position)
        return own if purpose == OWN else jax.random.fold_in(own, purpose)

    return jax.vmap(key)(state.seed, state.sample, positions)


def noise(
    state: SamplingState, positions: Lengths, vocab_size: int, purpose: int = OWN
) -> Float[Array, "B V"]:
    """Gumbel noise of each slot's token at `positions`."""
    return jax.vmap(lambda key: jax.random.gumbel(key, (vocab_size,)))(
        keys(state, positions, purpose)
    )


def draw(logits: Float[Array, "B V"], state: SamplingState, positions: Lengths) -> Int[Array, "B"]:
    """One token a slot, for `positions`, from its drawing law."""
    law = drawing_logits(logits, state)
    return jnp.argmax(law + noise(state, positions, logits.shape[-1]), axis=-1).astype(jnp.int32)


def log_probabilities(
    logits: Float[Array, "*rows V"], tokens: Int[Array, "*rows"], num_top: int
) -> tuple[Float[Array, "*rows"], Int[Array, "*rows n"], Float[Array, "*rows n"]]:
    """Log-probability of `tokens`, and the `num_top` most probable ids with theirs."""
    logprobs = jax.nn.log_softmax(logits, axis=-1)
    chosen = jnp.take_along_axis(logprobs, tokens[..., None], axis=-1)[..., 0]
    top, ids = jax.lax.top_k(logprobs, num_top)
    return chosen, ids.astype(jnp.int32), top
