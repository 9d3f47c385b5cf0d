"""`python -m tools.soak`: thousands of mixed requests through one engine of `tiny`, on the CPU.

Lengths, samplers, stops, samples a prompt and moments of arrival are drawn; some requests continue
what an earlier one wrote, some are cancelled while they wait, prefill or decode. Each answer must
be what a second engine writes for that request alone: one slot, no drafts, nothing reused. After
the warm-up nothing may compile, and memory may not grow. One JSON record, exit code 1 on failure.

    python -m tools.soak --requests 2000 --output soak.jsonl
"""

import dataclasses
import gc
import random
import sys
from typing import Any

import jax
import psutil
from absl import app, flags

import carat_jax
from carat_jax.bench.measure import Records
from carat_jax.config import SamplingParams, sampling_from
from carat_jax.engine.request import Request
from tools.tiny_score import held_out_prompts

_REQUESTS = flags.DEFINE_integer("requests", 2000, "Requests in all.")
_SEED = flags.DEFINE_integer("seed", 0, "Seed of the workload.")
_OUTPUT = flags.DEFINE_string("output", None, "File that the record is appended to.")
_COMMIT = flags.DEFINE_string("commit", None, "Commit of the code, where there is no git.")

SLOTS = 6
# Resident bytes that allocators may gain or lose between two looks at an idle process.
_SLACK = 32 * 2**20


@dataclasses.dataclass
class Tally:
    """What happened: counts, and one line for each answer that is not what it must be."""

    requests: int = 0
    samples: int = 0
    tokens: int = 0
    cancelled: int = 0
    refused: int = 0
    wrong: list[str] = dataclasses.field(default_factory=list)


class Workload:
    """Draws requests: `(prompt ids, sampling parameters)`.

    Args:
      engine: whom they are for.
      texts: ids that prompts are put together from.
      seed: of all that is drawn.
    """

    def __init__(self, engine: carat_jax.Engine, texts: list[list[int]], seed: int):
        self._random, self._texts = random.Random(seed), texts
        self._bos, self._vocab_size = engine.tokenizer.bos_id, engine.tokenizer.vocab_size
        self._context = engine.loop.max_context

    def prompt(self, written: list[list[int]]) -> list[int]:
        """Ids of a fresh prompt, or of one that continues what was written earlier."""
        draw = self._random
        start = draw.choice(written) if written and self.happens(0.3) else [self._bos]
        length = int((self._context / 2) ** draw.random())
        more: list[int] = []
        while len(more) < length:
            more += draw.choice(self._texts)
        return [*start, *more[:length]][: self._context - 8]

    def params(self) -> SamplingParams:
        """Sampling parameters, every field of them drawn now and then."""
        draw = self._random
        chosen: dict[str, Any] = {
            "temperature": draw.choice([0.0, 0.0, 0.7, 1.0]),
            "seed": draw.randrange(2**32),
            "max_tokens": draw.choice([0, 1, 2, 8, 16, 32, 48]),
            "n": draw.choice([1, 1, 1, 2, 3]),
        }
        often = {
            "top_k": draw.choice([1, 5, 40]),
            "top_p": draw.choice([0.5, 0.9]),
            "min_p": 0.1,
            "repetition_penalty": 1.2,
            "stop": draw.choice([".", "and", [" the", "?"]]),
            "stop_token_ids": [draw.randrange(self._vocab_size)],
            "logprobs": draw.choice([0, 3]),
            "ignore_eos": True,
            "logit_bias": {draw.randrange(self._vocab_size): 2.0},
        }
        chosen |= {name: value for name, value in often.items() if draw.random() < 0.2}
        return sampling_from(SamplingParams(), **chosen)

    def choice(self, among: list[Any]) -> Any:
        """One of them."""
        return self._random.choice(among)

    def happens(self, chance: float) -> bool:
        """Whether something of that chance does."""
        return self._random.random() < chance


def tiny() -> tuple[carat_jax.Engine, carat_jax.Engine, Workload]:
    """An engine of `tiny` with many slots and a drafter, one without, and the workload."""
    engine = carat_jax.load(
        "tiny",
        dtype="float32",
        engine={
            "max_batch": SLOTS, "max_queue": 10, "max_context": 256,
            "prefill_chunks": [16, 64], "prefill_budget": 64,
        },
        decode={"drafter": "ngram", "draft_len": 3},
    )  # fmt: skip
    texts = [engine.tokenizer.encode(prompt.text)[1:] for prompt in held_out_prompts()]
    single = {"max_batch": 1, "reuse_prefix": False}
    alone = engine.variant(engine=single, decode={"drafter": "none"})
    return engine, alone, Workload(engine, texts, _SEED.value)


def judge(request: Request, alone: carat_jax.Engine, tally: Tally) -> None:
    """Compares an answer with the single run of its request."""
    got = request.result()
    want = alone.generate(list(request.prompt_ids), request.params)
    for one, single in zip(got.outputs, want.outputs, strict=True):
        tally.samples += 1
        tally.tokens += len(one.ids)
        is_whole = one.finish_reason != "cancelled"
        ids = single.ids if is_whole else single.ids[: len(one.ids)]
        same = one.ids == ids
        if is_whole:
            same = same and (one.text, one.finish_reason) == (single.text, single.finish_reason)
        same = same and len(one.logprobs or one.ids) == len(one.ids)
        if not same:
            tally.wrong.append(
                f"{list(request.prompt_ids)} {request.params}: {one} is not {single}"
            )


def serve(
    num_requests: int,
    load: Workload,
    crowd: carat_jax.Engine,
    alone: carat_jax.Engine,
    tally: Tally,
) -> None:
    """Runs requests to their ends: crowds that fill the queue, and times with free slots."""
    running: list[Request] = []
    written: list[list[int]] = []
    submitted = 0
    while submitted < num_requests or running:
        is_crowded = submitted // 25 % 2 == 0
        while submitted < num_requests and load.happens(0.5 if is_crowded else 0.06):
            prompt, params = load.prompt(written), load.params()
            if params.max_tokens and params.n > crowd.loop.room:
                tally.refused += _is_refused(crowd, prompt, params)
                break
            running.append(crowd.loop.submit(prompt, params))
            submitted += 1
        if running and load.happens(0.02):
            request = load.choice(running)
            tally.cancelled += not request.is_finished
            crowd.loop.cancel(request)
        crowd.loop.step()
        finished = [request for request in running if request.is_finished]
        running = [request for request in running if not request.is_finished]
        for request in finished:
            judge(request, alone, tally)
            tally.requests += 1
            written.append([*request.prompt_ids, *request.samples[0].ids])
            del written[:-SLOTS]


def _is_refused(engine: carat_jax.Engine, prompt: list[int], params: SamplingParams) -> bool:
    try:
        engine.loop.submit(prompt, params)
    except ValueError as refusal:
        return "engine.max_queue" in str(refusal)
    return False


def soak(
    crowd: carat_jax.Engine, alone: carat_jax.Engine, load: Workload, num_requests: int
) -> dict[str, Any]:
    """Serves a quarter of the requests, then the rest; what happened, with `passed`.

    Args:
      crowd: the engine under test.
      alone: what its answers are judged by.
      load: the requests.
      num_requests: how many.
    """
    for engine in (crowd, alone):
        engine.warm_up()
    tally = Tally()

    def look() -> tuple[int, int, int]:
        gc.collect()
        compiled = crowd.stats()["compilations"]
        return compiled, len(jax.live_arrays()), psutil.Process().memory_info().rss

    compiled, _, _ = look()
    serve(max(1, num_requests // 4), load, crowd, alone, tally)
    _, arrays, resident = look()
    serve(num_requests - tally.requests, load, crowd, alone, tally)
    compiled_after, arrays_after, resident_after = look()
    stats = crowd.stats()
    report = {
        **dataclasses.asdict(tally),
        "compilations": compiled_after - compiled,
        "arrays_grown": arrays_after - arrays,
        "resident_mb_grown": (resident_after - resident) / 2**20,
        "resident_mb": resident_after / 2**20,
    }
    for name in ("rounds", "prefills", "reused_tokens", "restarts", "mean_accepted_length"):
        report[name] = stats[name]
    report["passed"] = (
        not tally.wrong
        and crowd.loop.is_idle
        and report["compilations"] == report["restarts"] == 0
        and report["arrays_grown"] <= 0
        and resident_after - resident <= _SLACK
    )
    return report


def main(argv: list[str]) -> None:
    """Runs the soak."""
    if len(argv) > 1:
        raise app.UsageError(f"unexpected argument {argv[1]!r}")
    report = soak(*tiny(), _REQUESTS.value)
    for line in report.pop("wrong"):
        print(line, file=sys.stderr)
    Records(_OUTPUT.value, _COMMIT.value).add(
        bench="soak", model="tiny", seed=_SEED.value, **report
    )
    sys.exit(0 if report["passed"] else 1)


if __name__ == "__main__":
    app.run(main)
