"""Makes the serving trace: `python -m tools.make_trace` writes carat_jax/bench/trace.jsonl.

64 chat-like requests. Prompt lengths are log-normal with a median of 2,000 tokens, clipped to 128
to 8,000; every fourth request is a follow-up, which extends an earlier prompt by 200 to 600 tokens;
output lengths are log-normal with a median of 200, clipped to 32 to 512; arrivals are a Poisson
process, in units of its mean gap. The same seed gives the same file.
"""

import math
import random
import sys
from pathlib import Path

from carat_jax.bench.workload import TRACE, TraceRequest, write_trace

SEED = 7
NUM_REQUESTS = 64
FOLLOW_UP_EVERY = 4
# Median, spread (of the logarithm), least and most.
PROMPT = (2000, 0.8, 128, 8000)
OUTPUT = (200, 0.6, 32, 512)
EXTENSION = (200, 600)


def make_trace(seed: int = SEED) -> list[TraceRequest]:
    """The trace."""
    rng = random.Random(seed)
    requests: list[TraceRequest] = []
    arrival = 0.0
    for i in range(NUM_REQUESTS):
        extends, prompt_len = None, _length(rng, *PROMPT)
        if i % FOLLOW_UP_EVERY == FOLLOW_UP_EVERY - 1:
            fitting = [r for r in requests if r.prompt_len + EXTENSION[1] <= PROMPT[3]]
            earlier = rng.choice(fitting)
            extends, prompt_len = earlier.id, earlier.prompt_len + rng.randint(*EXTENSION)
        arrival += rng.expovariate(1)
        requests.append(
            TraceRequest(
                id=i,
                seed=rng.getrandbits(32),
                prompt_len=prompt_len,
                output_len=_length(rng, *OUTPUT),
                extends=extends,
                arrival=round(arrival, 4),
            )
        )
    return requests


def _length(rng: random.Random, median: float, spread: float, least: int, most: int) -> int:
    return min(most, max(least, round(math.exp(rng.gauss(math.log(median), spread)))))


if __name__ == "__main__":
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else TRACE
    write_trace(make_trace(), path)
    print(path)
