"""The serving workload: a trace of chat-like requests that anybody can replay.

`trace.jsonl` has one request a line: lengths, a seed, which earlier request's prompt it extends,
and when it arrives. It holds no token ids: those are a function of the seed and the vocabulary,
written here with nothing but Python's own generator, whose `random()` is the same everywhere.
Made by `tools/make_trace.py`. Imports the standard library alone.
"""

import dataclasses
import json
import random
from collections.abc import Sequence
from pathlib import Path

TRACE = Path(__file__).parent / "trace.jsonl"
# Requests a second of the open loop.
RATES = (0.25, 0.5, 1.0)
# Prompt ids are drawn from here: below are control and byte tokens, above (in Gemma's vocabulary of
# 262,144) those of images and sound.
_FIRST_ID, _LAST_ID = 1_000, 200_000


@dataclasses.dataclass(frozen=True)
class TraceRequest:
    """One request of the trace.

    Attributes:
      id: its place in the trace, from 0.
      seed: seed of its own ids: of the whole prompt, or of what it adds to the one it extends.
      prompt_len: tokens of its prompt, those of the prompt it extends included.
      output_len: tokens to generate, no fewer whatever they are.
      extends: id of the earlier request whose prompt this one begins with, or None.
      arrival: when it arrives, in mean gaps between arrivals: at a rate of r requests a second,
        `arrival / r` seconds after the start.
    """

    id: int
    seed: int
    prompt_len: int
    output_len: int
    extends: int | None
    arrival: float


def write_trace(requests: Sequence[TraceRequest], path: Path) -> None:
    """Writes one request a line."""
    lines = (json.dumps(dataclasses.asdict(request)) + "\n" for request in requests)
    path.write_text("".join(lines), encoding="utf-8")


def read_trace(path: Path = TRACE) -> list[TraceRequest]:
    """Reads a trace.

    Raises:
      ValueError: the file cannot be read, or a line of it is no request.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror}") from None
    requests = []
    for number, line in enumerate(lines):
        try:
            request = TraceRequest(**json.loads(line))
        except (TypeError, ValueError) as error:
            raise ValueError(f"{path}:{number + 1}: {error}") from None
        earlier = request.extends is None or request.extends < number
        if request.id != number or not earlier:
            raise ValueError(f"{path}:{number + 1}: ids count from 0, and extend earlier ones")
        requests.append(request)
    return requests


def scaled(requests: Sequence[TraceRequest], factor: float) -> list[TraceRequest]:
    """The trace with all lengths times `factor` (at least 4 tokens each), for small models."""

    def scale(length: int) -> int:
        return max(4, round(length * factor))

    shrunk: list[TraceRequest] = []
    for request in requests:
        before = 0 if request.extends is None else requests[request.extends].prompt_len
        kept = 0 if request.extends is None else shrunk[request.extends].prompt_len
        shrunk.append(
            dataclasses.replace(
                request,
                prompt_len=kept + scale(request.prompt_len - before),
                output_len=scale(request.output_len),
            )
        )
    return shrunk


def prompt_ids(requests: Sequence[TraceRequest], vocab_size: int) -> list[list[int]]:
    """The prompts of a trace: uniform ids, a function of its seeds and of the vocabulary's size."""
    span = min(vocab_size, _LAST_ID) - _FIRST_ID
    if span < 1:
        raise ValueError(f"a vocabulary of {vocab_size} has no ids from {_FIRST_ID} on")
    prompts: list[list[int]] = []
    for request in requests:
        kept = [] if request.extends is None else prompts[request.extends]
        draw = random.Random(request.seed).random
        own = [_FIRST_ID + int(draw() * span) for _ in range(request.prompt_len - len(kept))]
        prompts.append(kept + own)
    return prompts


def context_of(requests: Sequence[TraceRequest]) -> int:
    """Positions that the longest request needs, prompt and output."""
    return max(request.prompt_len + request.output_len for request in requests)
