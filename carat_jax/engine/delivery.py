"""Between samples and the arrays of a step: how each sample draws, and what was drawn for it."""

from collections.abc import Iterable
from typing import Any

import numpy as np

from carat_jax.config import SamplingParams
from carat_jax.decoding.steps import Drawn, SamplerKind
from carat_jax.engine.request import Sample, TokenInfo


def sampler_kind(samples: Iterable[Sample]) -> SamplerKind:
    """The sampler that serves all of these samples."""
    return kind_of(sample.request.params for sample in samples)


def kind_of(wanted: Iterable[SamplingParams]) -> SamplerKind:
    """The sampler that serves all of these parameters."""
    params = list(wanted)
    return SamplerKind(
        draws=any(p.temperature > 0 or p.repetition_penalty != 1 for p in params),
        logprobs=any(p.logprobs is not None for p in params),
    )


def sampling_row(sample: Sample) -> dict[str, Any]:
    """A sample's scalars of `SamplingState`, by field."""
    params = sample.request.params
    return {
        "temperature": np.float32(params.temperature),
        "top_k": np.int32(params.top_k),
        "top_p": np.float32(params.top_p),
        "min_p": np.float32(params.min_p),
        "repetition_penalty": np.float32(params.repetition_penalty),
        "seed": np.uint32(sample.request.seed),
        "sample": np.int32(sample.index),
    }


def vocabulary_rows(sample: Sample, vocab_size: int) -> tuple[np.ndarray, np.ndarray] | None:
    """A sample's bias and the tokens it has seen, `[V]` each; None where neither matters."""
    params = sample.request.params
    if not params.logit_bias and params.repetition_penalty == 1:
        return None
    bias, seen = np.zeros(vocab_size, np.float32), np.zeros(vocab_size, bool)
    for token, value in params.logit_bias:
        bias[token] = value
    seen[sample.known_ids] = True
    return bias, seen


def push(sample: Sample, drawn: Drawn, row: int, i: int) -> None:
    """Hands a sample its token, the i-th of a row that was copied to the host."""
    token, num_top = int(drawn.tokens[row, i]), sample.request.params.logprobs
    if token < 0:
        place = len(sample.known_ids)
        sample.fail(
            f"the logits of position {place} are NaN or leave no token (a hook? an overflow?)"
        )
        return
    sample.push(token, None if num_top is None else token_info(drawn, row, i, num_top))


def token_info(drawn: Drawn, row: int, i: int, num_top: int) -> TokenInfo:
    """The log-probabilities of a token, with the `num_top` best alternatives."""
    ids, logprobs = drawn.top_ids[row, i, :num_top], drawn.top_logprobs[row, i, :num_top]
    top = tuple((int(token), float(p)) for token, p in zip(ids, logprobs, strict=True))
    return TokenInfo(float(drawn.logprobs[row, i]), top)
