"""Token ids to text while they arrive: stop strings, and thoughts apart from the answer.

Invariants: a piece of text that was handed out is final; all pieces together are the one-shot
decoding of the same ids, cut at the first stop string; pushing ids one at a time or several at once
makes no difference. The work per token does not grow with the answer.

May import: the standard library and `tokenizer`.
"""

import codecs
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from carat_jax.engine.chat import THOUGHT_CLOSE, THOUGHT_OPEN
from carat_jax.engine.tokenizer import REPLACE_EACH_BYTE, Tokenizer

_THOUGHT_HEADER = "thought\n"


class TextStream:
    """Decodes one answer piece by piece and watches for stop strings.

    Held back are at most three bytes of an unfinished character and the longest end of the text
    that may still grow into a stop string. Of several stop strings the one that is complete first
    wins, and of those the longest. `stop_index` is the index, in order of pushing, of the id that
    completed it: the answer is the ids up to and including that one. What is pushed after a stop
    is ignored.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: Sequence[str] = (),
        include_stop: bool = False,
        skip_special: bool = True,
    ):
        self._stop = check_stop(stop)
        self._tokenizer = tokenizer
        self._include_stop = include_stop
        self._skip_special = skip_special
        self._utf8 = codecs.getincrementaldecoder("utf-8")(REPLACE_EACH_BYTE)
        self._held = ""
        self._num_ids = 0
        self.stop_index: int | None = None

    @property
    def stopped(self) -> bool:
        """Whether a stop string is complete."""
        return self.stop_index is not None

    def push(self, ids: Iterable[int]) -> str:
        """Take the next ids, return the text that has become final."""
        pieces = []
        for token_id in ids:
            if self.stopped:
                break
            self._num_ids += 1
            new = self._utf8.decode(self._tokenizer.token_bytes(token_id, self._skip_special))
            if new:
                pieces.append(self._release(new))
        return "".join(pieces)

    def finish(self) -> str:
        """Return what was held back; the answer ends here."""
        if self.stopped:
            return ""
        pending = self._release(self._utf8.decode(b"", final=True))
        tail, self._held = self._held, ""
        return pending + tail

    def _release(self, new: str) -> str:
        """Add `new` to the held text and give out all of it that no stop string can still claim."""
        text = self._held + new
        # Never a part of a stop string lies before the held text, so searching there is enough.
        ends = [(at + len(s), -len(s)) for s in self._stop if (at := text.find(s)) >= 0]
        if ends:
            end, minus_len = min(ends)
            self._held = ""
            self.stop_index = self._num_ids - 1
            return text[: end if self._include_stop else end + minus_len]
        keep = max((_overlap(text, s) for s in self._stop), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


class Split(NamedTuple):
    """New text of the two channels of a chat answer."""

    thought: str
    answer: str


class ThoughtSplitter:
    """Splits a chat answer `<|channel>thought\\n ... <channel|> ...` into thought and answer.

    The borders are recognised by their ids, so the same characters typed as text are text. Stop
    strings concern the answer alone. A thought that never ends leaves the answer empty.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = (), include_stop: bool = False):
        self._tokenizer = tokenizer
        self._answer = TextStream(tokenizer, stop, include_stop)
        self._open_id = tokenizer.token_id(THOUGHT_OPEN)
        self._close_id = tokenizer.token_id(THOUGHT_CLOSE)
        self._thought: _ThoughtStream | None = None
        self._num_ids = 0
        self.stop_index: int | None = None

    @property
    def stopped(self) -> bool:
        """Whether a stop string is complete in the answer."""
        return self.stop_index is not None

    def push(self, ids: Iterable[int]) -> Split:
        """Take the next ids, return the text of both channels that has become final."""
        thought, answer = [], []
        for token_id in ids:
            if self.stopped:
                break
            self._num_ids += 1
            if token_id == self._open_id and self._thought is None:
                self._thought = _ThoughtStream(self._tokenizer)
            elif token_id == self._close_id:
                thought.append(self._end_thought())
            elif self._thought is not None:
                thought.append(self._thought.push(token_id))
            else:
                answer.append(self._answer.push((token_id,)))
                if self._answer.stopped:
                    self.stop_index = self._num_ids - 1
        return Split("".join(thought), "".join(answer))

    def finish(self) -> Split:
        """Return what was held back of both channels."""
        thought, answer = self._end_thought(), self._answer.finish()
        if self._answer.stopped and not self.stopped:
            self.stop_index = self._num_ids - 1
        return Split(thought, answer)

    def _end_thought(self) -> str:
        thought, self._thought = self._thought, None
        return "" if thought is None else thought.finish()


class _ThoughtStream:
    """The text of one thought without the line that names its channel."""

    def __init__(self, tokenizer: Tokenizer):
        self._stream = TextStream(tokenizer)
        self._header: str | None = ""  # what may be the header; None once that is settled

    def push(self, token_id: int) -> str:
        return self._without_header(self._stream.push((token_id,)))

    def finish(self) -> str:
        text = self._without_header(self._stream.finish())
        rest = self._header or ""
        return text if rest == _THOUGHT_HEADER.rstrip() else text + rest

    def _without_header(self, text: str) -> str:
        if self._header is None:
            return text
        self._header += text
        if len(self._header) < len(_THOUGHT_HEADER) and _THOUGHT_HEADER.startswith(self._header):
            return ""
        text, self._header = self._header.removeprefix(_THOUGHT_HEADER), None
        return text


def check_stop(stop: Sequence[str]) -> tuple[str, ...]:
    """Return the stop strings as a tuple, or raise a ValueError; one text counts as one string."""
    stop = (stop,) if isinstance(stop, str) else tuple(stop)
    for text in stop:
        if not isinstance(text, str) or not text:
            raise ValueError(f"stop: expected texts of at least one character, got {text!r}")
    return stop


def _overlap(text: str, stop: str) -> int:
    """The length of the longest end of `text` that is a beginning of `stop`, and not all of it."""
    for size in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:size]):
            return size
    return 0
