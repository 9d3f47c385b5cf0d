"""What an engine can serve: refuses a request in one clear line before anything is queued.

Pure Python. Every refusal names the value, the limit and the way out.
"""

import dataclasses
from collections.abc import Sequence

from carat_jax.config import SamplingParams


@dataclasses.dataclass(frozen=True)
class Limits:
    """The bounds of one engine.

    Attributes:
      vocab_size: ids run from 0 to this less one.
      max_context: positions a slot holds, prompt and answer together.
      num_top: most alternatives a log-probability comes with.
    """

    vocab_size: int
    max_context: int
    num_top: int

    def check(self, prompt_ids: Sequence[int], params: SamplingParams) -> None:
        """Refuses (ValueError) what could not be served even with an empty queue."""
        self.check_ids("prompt", prompt_ids)
        if len(prompt_ids) >= self.max_context:
            raise ValueError(
                f"prompt: {len(prompt_ids)} tokens leave no room for an answer in a context of "
                f"{self.max_context}; shorten it or raise engine.max_context"
            )
        self.check_num_top(params.logprobs)
        ids = (*params.stop_token_ids, *(i for i, _ in params.logit_bias))
        if outside := [i for i in ids if i >= self.vocab_size]:
            raise ValueError(
                f"sampling: token id {outside[0]} is outside the vocabulary of {self.vocab_size}"
            )

    def check_score(self, ids: Sequence[int], num_top: int) -> None:
        """Refuses (ValueError) ids that cannot be scored."""
        self.check_whole("score", ids)
        self.check_num_top(num_top)

    def check_whole(self, what: str, ids: Sequence[int]) -> None:
        """Refuses ids that nothing is to be written after, if they are no tokens or do not fit."""
        self.check_ids(what, ids)
        if len(ids) > self.max_context:
            raise ValueError(
                f"{what}: {len(ids)} ids do not fit engine.max_context={self.max_context}"
            )

    def check_ids(self, what: str, ids: Sequence[int]) -> None:
        """Refuses no ids at all, and ids that are not tokens."""
        if not len(ids):
            raise ValueError(f"{what}: no token ids; it takes at least one, BOS")
        if bad := [i for i in ids if not 0 <= i < self.vocab_size]:
            raise ValueError(f"{what}: id {bad[0]} is outside the vocabulary of {self.vocab_size}")

    def check_num_top(self, num_top: int | None) -> None:
        """Refuses more alternatives than the samplers return."""
        if num_top is not None and not 0 <= num_top <= self.num_top:
            raise ValueError(f"sampling.logprobs: {num_top} is not from 0 to {self.num_top}")
