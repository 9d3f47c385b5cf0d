"""How `tiny` is judged: 100 prompts of a kind it never saw, and a mechanical verdict.

The right answer to a question is known, because the question was generated with it; a story is
judged by its sentences, each of which must follow the grammar. Imports nothing of carat_jax.
"""

import contextlib
import dataclasses
import random
from collections.abc import Callable, Sequence

from tools.tiny_corpus import Retry, Writer, plain_question
from tools.tiny_grammar import Recogniser, Template, grammar, split_sentences


@dataclasses.dataclass(frozen=True)
class Prompt:
    """A held-out prompt. `answer` is the only right one, or None where a story is wanted."""

    text: str
    is_chat: bool
    answer: str | None


def held_out_prompts(seed: int = 0) -> list[Prompt]:
    """The 100 prompts that `tiny` is judged by.

    40 questions and 20 requests for a story in the chat format, 20 questions and 20 beginnings of
    a story as plain text.
    """
    writer = Writer(random.Random(seed), held_out=True)

    def distinct(draw: Callable, count: int) -> list:
        drawn = {}
        while len(drawn) < count:
            with contextlib.suppress(Retry):
                value = draw()
                drawn.setdefault(str(value), value)
        return list(drawn.values())

    def sentence(templates: Sequence[Template]) -> Callable[[], str]:
        return lambda: writer.prompt(templates, writer.binding())

    questions = distinct(writer.exchange, 60)
    requests = distinct(sentence(writer.language.requests), 20)
    openings = distinct(sentence(writer.language.rules["open"]), 20)
    return [
        *(Prompt(e.question, True, e.answer) for e in questions[:40]),
        *(Prompt(request, True, None) for request in requests),
        *(Prompt(plain_question(e), False, e.answer) for e in questions[40:]),
        *(Prompt(opening, False, None) for opening in openings),
    ]


@dataclasses.dataclass(frozen=True)
class Score:
    """How `tiny` did on the held-out prompts, as fractions, and what went wrong."""

    well_formed: float
    right: float
    mistakes: tuple[str, ...]


def score(prompts: Sequence[Prompt], replies: Sequence[str]) -> Score:
    """Judges greedy replies.

    A reply to a question is right if its first line is the answer. Every sentence of every reply
    is checked against the grammar; one that the token limit cut off at the end is not counted.
    """
    recogniser, mistakes, counts = Recogniser(grammar()), [], [0, 0, 0, 0]
    for prompt, reply in zip(prompts, replies, strict=True):
        lines = reply.strip().split("\n")
        if prompt.answer is not None:
            counts[1] += 1
            is_right = lines[0].strip() == prompt.answer
            counts[0] += is_right
            if not is_right:
                mistakes.append(f"{prompt.text!r}: {lines[0]!r}, not {prompt.answer!r}")
            lines = lines[:1]
            if not recogniser.accepts(prompt.answer):
                continue  # a copied text need not be a sentence
        sentences = split_sentences(" ".join(lines))
        if sentences and not sentences[-1].rstrip('"').endswith((".", "!", "?")):
            sentences.pop()
        bad = [s for s in sentences if not recogniser.accepts(s)]
        counts[2] += len(sentences) - len(bad)
        counts[3] += len(sentences)
        mistakes += [f"not well formed: {s!r}" for s in bad]
    return Score(counts[2] / max(1, counts[3]), counts[0] / max(1, counts[1]), tuple(mistakes))
