"""Replays a trace through an engine and keeps the times at which its tokens came.

A closed loop keeps so many requests in the engine; an open loop sends each when it arrives,
whatever the engine is doing. Tokens are stamped when the step that delivers them returns, that is,
when a caller could have them.
"""

import dataclasses
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from carat_jax.bench.workload import TraceRequest
from carat_jax.config import SamplingParams, sampling_from
from carat_jax.engine.api import Engine
from carat_jax.engine.request import Request

PERCENTILES = (50, 90, 99)


@dataclasses.dataclass
class Served:
    """One request's life, in seconds of the replay's clock.

    Attributes:
      request: what was asked.
      sent: when it was sent, or, in an open loop, when it arrived.
      token_times: when each token could be had.
      finish_reason: why it ended.
    """

    request: TraceRequest
    sent: float
    token_times: list[float] = dataclasses.field(default_factory=list)
    finish_reason: str | None = None

    @property
    def is_whole(self) -> bool:
        """Whether it got exactly the tokens that were asked for."""
        is_full = len(self.token_times) == self.request.output_len
        return is_full and self.finish_reason == "length"


@dataclasses.dataclass(frozen=True)
class EngineStep:
    """One step of the engine's loop: when it returned, and the seconds of Python it took."""

    end: float
    python: float


class Replay:
    """A trace on its way through an engine.

    Args:
      engine: the engine.
      requests: the trace.
      prompts: each request's ids.

    Attributes:
      served: what became of each request that was sent.
      steps: the steps of the loop.
    """

    def __init__(
        self, engine: Engine, requests: Sequence[TraceRequest], prompts: Sequence[Sequence[int]]
    ):
        self._loop, self._prompts = engine.loop, prompts
        self._base = _greedy(engine)
        self._waiting = list(reversed(requests))
        self._running: list[tuple[Request, Served]] = []
        self.served: list[Served] = []
        self.steps: list[EngineStep] = []
        self._start = time.perf_counter()

    def closed(self, concurrency: int) -> list[Served]:
        """Keeps `concurrency` requests in the engine until all are served."""
        while self._waiting or self._running:
            while self._waiting and len(self._running) < concurrency:
                self._send(self._now())
            self._step()
        return self.served

    def open(self, rate: float) -> list[Served]:
        """Sends requests as they arrive, `rate` a second on average."""
        while self._waiting or self._running:
            while self._waiting and (due := self._waiting[-1].arrival / rate) <= self._now():
                self._send(due)
            if self._running:
                self._step()
            else:
                time.sleep(max(0.0, self._waiting[-1].arrival / rate - self._now()))
        return self.served

    def _now(self) -> float:
        return time.perf_counter() - self._start

    def _send(self, sent: float) -> None:
        asked = self._waiting.pop()
        params = sampling_from(self._base, max_tokens=asked.output_len)
        served = Served(asked, sent)
        self._running.append((self._loop.submit(self._prompts[asked.id], params), served))
        self.served.append(served)

    def _step(self) -> None:
        # The thread's own time: it sleeps while it waits for the device.
        before = time.thread_time()
        self._loop.step()
        now, running = self._now(), []
        self.steps.append(EngineStep(now, time.thread_time() - before))
        for request, served in self._running:
            deltas = request.samples[0].deltas
            while deltas:
                served.token_times += [now] * len(deltas.popleft().ids)
            served.finish_reason = request.samples[0].finish_reason
            if not request.is_finished:
                running.append((request, served))
        self._running = running


def warm_up(engine: Engine, lengths: Sequence[int] | None = None) -> float:
    """Runs greedy requests through every shape that a replay uses; seconds.

    Args:
      engine: it.
      lengths: of the replay's prompts; None is any.
    """
    started, loop = time.perf_counter(), engine.loop
    params = sampling_from(_greedy(engine), max_tokens=4)
    for i, size in enumerate(lengths or engine.config.engine.prefill_chunks):
        # Prompts of their own, so that none continues from what a slot still holds of another.
        ids = [engine.model.vocab_size // 2 + i] * min(size, loop.max_context - 8)
        loop.run([loop.submit(ids, params) for _ in range(loop.num_slots)])
    return time.perf_counter() - started


def _greedy(engine: Engine) -> SamplingParams:
    return sampling_from(
        engine.config.sampling, temperature=0.0, ignore_eos=True, n=1, stop=(), logprobs=None
    )


def percentiles(values: Sequence[float], name: str, factor: float = 1.0) -> dict[str, float]:
    """`{name}_p50` and so on of values times `factor`, linear between two values."""
    return {
        f"{name}_p{q}": float(np.percentile(values, q)) * factor if len(values) else float("nan")
        for q in PERCENTILES
    }


def summary(served: Sequence[Served]) -> dict[str, Any]:
    """What a replay comes to.

    Time per output token of a request is from its first token to its last, over the tokens after
    the first; the gaps between tokens are those a reader sees, 0 within one speculative round.
    """
    seconds = max((s.token_times[-1] for s in served if s.token_times), default=0.0)
    times = [s.token_times for s in served if len(s.token_times) > 1]
    per_token = [(t[-1] - t[0]) / (len(t) - 1) for t in times]
    gaps = [gap for t in times for gap in np.diff(t)]
    first = [s.token_times[0] - s.sent for s in served if s.token_times]
    tokens = sum(len(s.token_times) for s in served)
    return {
        "requests": len(served),
        "lost": sum(not s.is_whole for s in served),
        "prompt_tokens": sum(s.request.prompt_len for s in served),
        "output_tokens": tokens,
        "seconds": seconds,
        "output_tokens_per_s": tokens / seconds if seconds else 0.0,
        "tpot_ms_mean": float(np.mean(per_token)) * 1e3 if per_token else float("nan"),
        **percentiles(per_token, "tpot_ms", 1e3),
        **percentiles(gaps, "gap_ms", 1e3),
        **percentiles(first, "first_token_s"),
    }


def progress_of(after: Mapping[str, Any], before: Mapping[str, Any]) -> dict[str, Any]:
    """What an engine's counters counted between two readings of its stats."""
    counts = {
        key: after[key] - before[key]
        for key in ("rounds", "prefills", "reused_tokens", "restarts", "compilations")
        if key in after
    }
    rounds = after["slot_rounds"] - before["slot_rounds"]
    accepted = sum(after["accepted"]) - sum(before["accepted"])
    return counts | {"tokens_per_round": 1 + accepted / rounds if rounds else 0.0}
