"""`python -m carat_jax.bench.exactness`: is the output with drafts that of plain decoding, bit by
bit?

Runs the same prompts through the public engine without a drafter and with each drafter and draft
length, and counts the prompts whose ids and log-probabilities agree in every bit: with
`decode.uniform_rows`, where all must, and without, for contrast. There it also tells how close the
two best tokens were where a text first went another way. A scripted drafter is told the plain
answers and gets a random number of drafts right in each round. JSON lines go to `--output`; exit
code 1 if a row that must be identical is not.

    python -m carat_jax.bench.exactness --config configs/tiny.yaml --prompts 200 --tokens 60
"""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from absl import flags

import carat_jax
from carat_jax.bench import command
from carat_jax.bench.measure import Records
from carat_jax.bench.scripted import ScriptDrafter, script
from carat_jax.config import read_settings
from carat_jax.engine.drafting import Drafting
from carat_jax.engine.request import Result

_FLAGS = command.new_flags("File that JSON lines are appended to.")
_own = {"flag_values": _FLAGS}
_PROMPTS = flags.DEFINE_integer("prompts", 200, "Prompts of each run.", 1, **_own)
_TOKENS = flags.DEFINE_integer("tokens", 60, "Tokens generated after each.", 1, **_own)
_LONGEST = flags.DEFINE_integer("longest", 100, "Tokens of the longest prompt.", 4, **_own)
_ROWS = flags.DEFINE_integer("uniform_rows", 4, "Rows of a pass that all runs share.", 2, **_own)
_DRAFTERS = flags.DEFINE_list("drafters", ["ngram", "script"], "Drafters to compare.", **_own)
_DRAFT_LENS = flags.DEFINE_list(
    "draft_lens", None, "Draft lengths; 1 to uniform_rows - 1 by default.", **_own
)
_TEMPERATURE = flags.DEFINE_float("temperature", 0.0, "Above 0 tokens are drawn.", 0, **_own)

DRAFTERS = ("script", "ngram", "assistant", "combined", "model")
# Prompts cut from one text that the model wrote.
_CUTS = 4


def make_prompts(engine: carat_jax.Engine, count: int, longest: int) -> list[list[int]]:
    """Ids to continue, from 4 to `longest` of them: what the model wrote itself, or random ones."""
    lengths = np.linspace(min(4, longest), longest, count).astype(int)
    bos = engine.tokenizer.bos_id
    if engine.config.model.startswith("random:"):
        rng = np.random.default_rng(0)
        return [[bos, *rng.integers(256, 4096, n - 1).tolist()] for n in lengths]
    law = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "seed": 0, "ignore_eos": True}
    texts = engine.generate([bos], n=-(-count // _CUTS), max_tokens=longest, **law).outputs
    return [[bos, *texts[i % len(texts)].ids][:n] for i, n in enumerate(lengths)]


@dataclasses.dataclass(frozen=True)
class Agreement:
    """How two runs over the same prompts compare.

    Attributes:
      same_ids: prompts whose ids are equal.
      same_bits: prompts whose log-probabilities are equal too, in every bit.
      widest_gap: between the two best log-probabilities of plain decoding where a text first takes
        another token, the largest; None where none does.
    """

    same_ids: int
    same_bits: int
    widest_gap: float | None


def compare(plain: Sequence[Result], other: Sequence[Result]) -> Agreement:
    """Compares answers of one length that tell two alternatives a token."""
    gaps, same_bits = [], 0
    for want, got in zip(plain, other, strict=True):
        differs = [a != b for a, b in zip(want.ids, got.ids, strict=True)]
        if any(differs):
            (_, best), (_, second) = want.logprobs[differs.index(True)].top
            gaps.append(best - second)
        else:
            same_bits += want.logprobs == got.logprobs
    return Agreement(len(plain) - len(gaps), same_bits, max(gaps, default=None))


def scripted(plain: Sequence[Result], num_drafts: int) -> Drafting:
    """A drafter that is told the plain answers."""
    texts = [[*result.prompt_ids, *result.ids] for result in plain]
    return Drafting(ScriptDrafter(num_drafts), script(texts, num_drafts))


def runs(
    engine: carat_jax.Engine,
    prompts: Sequence[Sequence[int]],
    num_rows: int,
    drafters: Sequence[tuple[str, int]],
    **sampling: Any,
) -> Iterator[tuple[str, int, list[Result]]]:
    """Answers of plain decoding, then with each (drafter, draft length), under `uniform_rows`.

    Yields:
      The drafter's name, its draft length, and a result for each prompt.
    """
    base = engine.variant(decode={"drafter": "none", "uniform_rows": num_rows})
    sampling = {"ignore_eos": True, "logprobs": 2} | sampling
    plain = base.generate(prompts, **sampling)
    yield "none", 0, plain
    for name, length in drafters:
        if name == "script":
            made = carat_jax.Engine(base.settings, engine._opened, scripted(plain, length))
        else:
            made = base.variant(decode={"drafter": name, "draft_len": length})
        yield name, length, made.generate(prompts, **sampling)


def main() -> int:
    """Runs the comparison; 1 if a row that must be identical is not."""
    num_rows = _ROWS.value
    lengths = list(range(1, num_rows))
    if _DRAFT_LENS.value is not None:
        lengths = command.whole_numbers("draft_lens", _DRAFT_LENS.value)
    if long := [length for length in lengths if length >= num_rows]:
        raise ValueError(f"--draft_lens: {long[0]} must be less than --uniform_rows={num_rows}")
    if unknown := [name for name in _DRAFTERS.value if name not in DRAFTERS]:
        known = ", ".join(DRAFTERS)
        raise ValueError(f"--drafters: no drafter {unknown[0]!r}; there are {known}")
    drafters = list(itertools.product(_DRAFTERS.value, lengths))
    engine = carat_jax.load(read_settings(_FLAGS.config, _FLAGS.set))
    prompts = make_prompts(engine, _PROMPTS.value, _LONGEST.value)
    records, is_exact = Records(_FLAGS.output, _FLAGS.commit), True
    law = {"temperature": _TEMPERATURE.value, "seed": 0, "max_tokens": _TOKENS.value}
    for rows in (num_rows, 0):
        plain = None
        for name, length, results in runs(engine, prompts, rows, drafters, **law):
            plain = plain or results
            found = compare(plain, results)
            is_exact &= not rows or found.same_bits == len(prompts)
            rounds = sum(result.acceptance.slot_rounds for result in results) or 1
            accepted = sum(sum(result.acceptance.accepted) for result in results)
            records.add(
                bench="exactness", model=engine.config.model, dtype=engine.config.dtype,
                uniform_rows=rows, drafter=name, draft_len=length, prompts=len(prompts),
                tokens=_TOKENS.value, longest_prompt=_LONGEST.value,
                temperature=_TEMPERATURE.value, **dataclasses.asdict(found),
                tokens_a_round=1 + accepted / rounds,
            )  # fmt: skip
    return int(not is_exact)


if __name__ == "__main__":
    command.run(main, _FLAGS, __doc__)
