"""What an ablation measures of one engine: its time, the bytes it has to move, its exactness."""

import dataclasses
import hashlib
import random
from collections.abc import Sequence
from typing import Any

from carat_jax.bench import cost
from carat_jax.bench.ablation_plan import Workload
from carat_jax.config import Settings
from carat_jax.engine.api import Engine
from carat_jax.engine.tokenizer import Tokenizer

# Alternatives that are compared at each place.
_NUM_TOP = 20

# What prompts are made of: the world of `tiny`, which repeats itself as a long text does.
_SENTENCES = """
Once upon a time, a brave prince named Jasper lived in the barn.|Everyone knew Jasper well.
One foggy evening, a careful mole named Milo gave Jasper a seed.|He loved carrots.
"I wonder what it will be," said Jasper.|He dug a little hole and put the seed into it.
Day after day, Jasper watered the seed.|One week went by, but nothing grew.
"Good things take time," said Milo.|Then, after two days, there was a little green leaf.
The leaf grew and grew.|One snowy afternoon, it began to rain.|"I must find a dry place," said Milo.
He ran as fast as he could until he saw a light in the valley.|He knocked on the door.
A careful baker named Dora opened the door.|They sat by the fire and ate carrots.
"You can stay here until the storm is over," said Dora.|Today Hanna is in the forest.
"""


def story_prompts(tokenizer: Tokenizer, settings: Settings, workload: Workload) -> list[list[int]]:
    """One prompt a slot, each `workload.prompt_tokens` ids long, other sentences first in each."""
    sentences = [line.strip() for line in _SENTENCES.replace("\n", "|").split("|") if line.strip()]
    prompts = []
    for slot in range(settings.build().engine.max_batch):
        rng, ids, text = random.Random(slot), [], ""
        while len(ids) < workload.prompt_tokens:
            text = f"{text} {' '.join(rng.sample(sentences, len(sentences)))}".strip()
            ids = tokenizer.encode(text)
        prompts.append(ids[: workload.prompt_tokens])
    return prompts


@dataclasses.dataclass(frozen=True)
class Timed:
    """One run of a workload.

    Attributes:
      seconds_a_token: of one stream, from the moment that every stream has its first token.
      accepted: tokens a round commits on average.
    """

    seconds_a_token: float
    accepted: float


def timed(engine: Engine, prompts: Sequence, workload: Workload) -> Timed:
    """Runs the workload once, greedily and past any end."""
    logprobs = _NUM_TOP if workload.logprobs else None
    results = engine.generate(prompts, **_greedy(workload), logprobs=logprobs)
    first = max(result.timings.queue + result.timings.prefill for result in results)
    last = max(sum(dataclasses.astuple(result.timings)) for result in results)
    counts = [result.acceptance for result in results]
    rounds = sum(count.slot_rounds for count in counts)
    accepted = sum(sum(count.accepted) for count in counts)
    return Timed((last - first) / (workload.new_tokens - 1), 1 + accepted / max(1, rounds))


def _greedy(workload: Workload) -> dict[str, Any]:
    return {
        "temperature": 0, "max_tokens": workload.new_tokens, "ignore_eos": True,
        "repetition_penalty": 1, "n": 1, "stop": (), "seed": 0,
    }  # fmt: skip


def bytes_a_round(engine: Engine, workload: Workload) -> float:
    """Bytes that a round has to read at the middle of the output; see `bench.cost`."""
    context = workload.prompt_tokens + workload.new_tokens // 2
    return cost.total(cost.round_costs(engine, context, engine.loop.num_slots)).bytes


class Reference:
    """The engine that others are held against, and what it says to the prompts.

    Args:
      engine: the float32 engine in plain JAX, or another where its weights do not fit.
      words: what it is, for the table.
      prompts: ids of each prompt.
      workload: how many ids it writes.
    """

    def __init__(self, engine: Engine, words: str, prompts: Sequence, workload: Workload):
        self._engine, self._words = engine, words
        self._ids = [r.ids for r in engine.generate(list(prompts), **_greedy(workload))]

    def compare(self, engine: Engine, prompts: Sequence, workload: Workload) -> dict[str, Any]:
        """How far an engine's own text is from what the reference thinks of it.

        Returns:
          The largest difference of a log-probability (natural; of the ids written and of the
          likeliest others) at any place of the engine's text, the first place whose id differs
          from the reference's own text, and digests of the text and of its log-probabilities.
        """
        results = engine.generate(list(prompts), **_greedy(workload), logprobs=_NUM_TOP)
        largest, firsts = 0.0, []
        for result, exact in zip(results, self._ids, strict=True):
            told = self._engine.score([*result.prompt_ids, *result.ids], num_top=_NUM_TOP)
            for got, want in zip(result.logprobs, told[len(result.prompt_ids) :], strict=True):
                pairs = [(got.logprob, want.logprob)]
                others = dict(want.top)
                pairs += [(p, others[i]) for i, p in got.top if i in others]
                largest = max(largest, *(abs(a - b) for a, b in pairs))
            places = enumerate(zip(result.ids, exact, strict=True))
            firsts.append(next((i for i, (a, b) in places if a != b), None))
        differing = [place for place in firsts if place is not None]
        text = [result.ids for result in results]
        bits = [[place.logprob for place in result.logprobs] for result in results]
        return {
            "max_logprob_difference": largest,
            "first_difference": min(differing) if differing else None,
            "reference": self._words,
            "text": _digest(text),
            "bits": _digest(bits),
        }


def _digest(value: Any) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()[:6]


def first_line(error: BaseException) -> str:
    """What went wrong, in one line."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
