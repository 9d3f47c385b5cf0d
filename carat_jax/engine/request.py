"""What a caller asks for and gets back, and one sample's life in between.

`Request` and `Result` are what the API deals in; `Sample` is the engine's mutable record of one
answer being written. No jax here.
"""

import dataclasses
import time
from collections import deque
from collections.abc import Sequence

from carat_jax.config import SamplingParams
from carat_jax.engine.counters import Acceptance
from carat_jax.engine.text_stream import Split, TextStream, ThoughtSplitter
from carat_jax.engine.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True)
class TokenInfo:
    """Log-probabilities at one generated (or scored) token.

    They are taken from the logits before temperature and truncation, after bias and suppression.

    Attributes:
      logprob: of the token itself, natural logarithm.
      top: the most probable `(id, logprob)` pairs, best first.
    """

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclasses.dataclass(frozen=True)
class Delta:
    """A piece of one streamed answer. `text` is final: it is never rewritten."""

    text: str
    ids: tuple[int, ...] = ()
    thought: str = ""
    logprobs: tuple[TokenInfo, ...] = ()
    finish_reason: str | None = None


@dataclasses.dataclass(frozen=True)
class Completion:
    """One finished sample.

    Attributes:
      text: the answer, without end tokens, cut before the stop string that ended it.
      ids: every generated id, including the one that ended it.
      finish_reason: "stop" (end token or stop string), "length", "cancelled", or "error".
      seed: the request's seed; with `index` it reproduces the sample.
      index: which sample of its prompt this is.
      logprobs: one entry an id if asked for, else None.
      thought: the thinking part of a chat answer.
      error: what ended it, if `finish_reason` is "error".
    """

    text: str
    ids: tuple[int, ...]
    finish_reason: str
    seed: int
    index: int
    logprobs: tuple[TokenInfo, ...] | None = None
    thought: str = ""
    error: str = ""


@dataclasses.dataclass(frozen=True)
class Timings:
    """Seconds a request spent waiting, until its first token after that, and writing the rest."""

    queue: float
    prefill: float
    decode: float


@dataclasses.dataclass(frozen=True)
class Result:
    """Everything that came of one prompt. `text`, `ids` and the like are those of sample 0."""

    prompt_ids: tuple[int, ...]
    outputs: tuple[Completion, ...]
    timings: Timings
    acceptance: Acceptance

    @property
    def text(self) -> str:
        """The first sample's text."""
        return self.outputs[0].text

    @property
    def ids(self) -> tuple[int, ...]:
        """The first sample's ids."""
        return self.outputs[0].ids

    @property
    def thought(self) -> str:
        """The first sample's thought."""
        return self.outputs[0].thought

    @property
    def finish_reason(self) -> str:
        """Why the first sample ended."""
        return self.outputs[0].finish_reason

    @property
    def logprobs(self) -> tuple[TokenInfo, ...] | None:
        """The first sample's log-probabilities."""
        return self.outputs[0].logprobs

    @property
    def num_generated(self) -> int:
        """Ids generated in all samples together."""
        return sum(len(output.ids) for output in self.outputs)


class LogitsError(FloatingPointError):
    """A sample ended because its logits were NaN or left no token; all others were finished.

    Attributes:
      results: of all prompts in their order, those that ended in an error included.
    """

    def __init__(self, message: str, results: Sequence[Result]):
        super().__init__(message)
        self.results = list(results)


class Sample:
    """One answer being written: its ids and text so far, and why it ended.

    `num_dispatched` counts its tokens and those that steps on their way will add at least. `length`
    and `furthest` are of its slot's caches after the steps that were read: positions held, and one
    past the furthest position written; both run ahead of the ids where a stop was passed.
    """

    def __init__(self, request: "Request", index: int):
        self.request, self.index = request, index
        self.ids: list[int] = []
        self.logprobs: list[TokenInfo] = []
        self.finish_reason: str | None = None
        self.error = ""
        self.num_dispatched = 0
        self.length = self.furthest = 0
        self.deltas: deque[Delta] = deque()
        self._text, self._thought = [], []
        self._stream = request.new_stream()

    @property
    def is_finished(self) -> bool:
        """Whether nothing more will be added."""
        return self.finish_reason is not None

    @property
    def wants_more(self) -> bool:
        """Whether a further step should be run for it, counting those not read yet."""
        return not self.is_finished and self.num_dispatched < self.request.budget

    @property
    def known_ids(self) -> list[int]:
        """Prompt and output: what its cache slot must hold, the last id excepted."""
        return [*self.request.prompt_ids, *self.ids]

    def push(self, token: int, info: TokenInfo | None) -> None:
        """Takes the next token. A stop outranks the length limit it coincides with."""
        request = self.request
        if request.first_token_time is None:
            request.first_token_time = time.perf_counter()
        self.ids.append(token)
        if info is not None:
            self.logprobs.append(info)
        if token in request.end_ids:
            self._emit(Split("", ""), token, info, "stop")
            return
        split = self._stream.push((token,))
        reason = None
        if self._stream.stopped:
            reason = "stop"
        elif len(self.ids) >= request.budget:
            reason = "length"
        self._emit(split, token, info, reason)

    def cancel(self) -> None:
        """Ends it where it is."""
        if not self.is_finished:
            self._emit(Split("", ""), None, None, "cancelled")

    def fail(self, error: str) -> None:
        """Ends it because no next token can be drawn."""
        self.error = error
        self._emit(Split("", ""), None, None, "error")

    def completion(self) -> Completion:
        """The finished sample."""
        request = self.request
        return Completion(
            text="".join(self._text),
            ids=tuple(self.ids),
            finish_reason=self.finish_reason or "cancelled",
            seed=request.seed,
            index=self.index,
            logprobs=None if request.params.logprobs is None else tuple(self.logprobs),
            thought="".join(self._thought),
            error=self.error,
        )

    def _emit(
        self, split: Split, token: int | None, info: TokenInfo | None, reason: str | None
    ) -> None:
        if reason is not None:
            tail = self._stream.finish()
            split = Split(split.thought + tail.thought, split.answer + tail.answer)
            if self._stream.stopped and reason == "length":
                reason = "stop"
            self.finish_reason = reason
            self.request.finish_time = time.perf_counter()
        self._text.append(split.answer)
        self._thought.append(split.thought)
        self.deltas.append(
            Delta(
                text=split.answer,
                ids=() if token is None else (token,),
                thought=split.thought,
                logprobs=() if info is None else (info,),
                finish_reason=reason,
            )
        )


class _Plain:
    """A `TextStream` that looks like a `ThoughtSplitter` without thoughts."""

    def __init__(self, stream: TextStream):
        self._stream = stream

    @property
    def stopped(self) -> bool:
        return self._stream.stopped

    def push(self, ids: Sequence[int]) -> Split:
        return Split("", self._stream.push(ids))

    def finish(self) -> Split:
        return Split("", self._stream.finish())


class Request:
    """One prompt with its sampling parameters; owns the samples written for it.

    Args:
      prompt_ids: the prompt, BOS included.
      params: how to sample.
      seed: the seed in use (drawn by the engine if `params.seed` is None).
      budget: most ids per sample: `max_tokens`, or what the context leaves.
      end_ids: ids that end a sample.
      tokenizer: for the text of the answers.
      is_chat: split the answer into thought and text.
      num_places: drafts a round verifies, for the count of those accepted.
    """

    def __init__(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        seed: int,
        budget: int,
        end_ids: frozenset[int],
        tokenizer: Tokenizer,
        is_chat: bool,
        num_places: int = 0,
    ):
        self.prompt_ids, self.params, self.seed = tuple(prompt_ids), params, seed
        self.budget, self.end_ids = budget, end_ids
        self._tokenizer, self._is_chat = tokenizer, is_chat
        self.acceptance = Acceptance(num_places)
        self.submit_time = time.perf_counter()
        self.start_time: float | None = None
        self.first_token_time: float | None = None
        self.finish_time: float | None = None
        self.samples = [Sample(self, i) for i in range(params.n)]
        if budget == 0:
            for sample in self.samples:
                sample.finish_reason = "length"
                sample.deltas.append(Delta("", finish_reason="length"))

    def start(self) -> None:
        """Its first sample left the queue."""
        if self.start_time is None:
            self.start_time = time.perf_counter()

    @property
    def is_finished(self) -> bool:
        """Whether every sample is."""
        return all(sample.is_finished for sample in self.samples)

    def new_stream(self) -> ThoughtSplitter | _Plain:
        """A fresh decoder of an answer."""
        arguments = (self._tokenizer, self.params.stop, self.params.include_stop)
        return ThoughtSplitter(*arguments) if self._is_chat else _Plain(TextStream(*arguments))

    def result(self) -> Result:
        """What came of it."""
        now = time.perf_counter()
        start = self.start_time or now
        first = self.first_token_time or start
        return Result(
            prompt_ids=self.prompt_ids,
            outputs=tuple(sample.completion() for sample in self.samples),
            acceptance=self.acceptance,
            timings=Timings(
                queue=start - self.submit_time,
                prefill=first - start,
                decode=max(0.0, (self.finish_time or now) - first),
            ),
        )
