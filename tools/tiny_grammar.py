"""The grammar of `tiny`'s language: reads `tiny_grammar.txt`, fills its patterns, recognises them.

A `Template` is a sentence pattern with slots, a `Binding` says what the slots of one text stand
for, and a `Recogniser` decides whether a sentence follows some pattern and agrees with itself (a
"she" is a girl's name). The same file drives both, so what is generated is what is accepted.
The first lines of the file describe its format. Imports nothing of carat_jax.
"""

import dataclasses
import functools
import random
import re
import zlib
from collections.abc import Iterable
from pathlib import Path

GRAMMAR = Path(__file__).with_name("tiny_grammar.txt")
NAME_SLOTS = ("A", "B", "C")
_HELD_OUT_OF = 16
# `{` because patterns are cut as well.
_NEXT_SENTENCE = re.compile(r'\s+["A-Z0-9{]|\s*$')
_SLOT = re.compile(r"\{([A-Za-z]+)(\d*)((?:\.\w+)*)\}")


def split_sentences(text: str) -> list[str]:
    """Cuts at . ! ? outside quotation marks, where white space and a new sentence follow."""
    sentences, start, quoted = [], 0, False
    for i, char in enumerate(text):
        if char == '"':
            quoted = not quoted
        before = text[max(0, i - 1) : i + 1]
        ends = char in ".!?" or (char == '"' and before[0] in ".!?")
        if ends and not quoted and _NEXT_SENTENCE.match(text, i + 1):
            sentences.append(text[start : i + 1].strip())
            start = i + 1
    return sentences + ([text[start:].strip()] if text[start:].strip() else [])


def _with_article(word: str) -> str:
    return f"{'an' if word[0] in 'aeiou' else 'a'} {word}"


def _entry(lexicon: str, word: str, forms: dict[str, str]) -> dict[str, str]:
    """Every form of a lexicon entry, keyed as a slot writes it: "self", "he", "a", "He", ..."""
    entry = {**forms, "self": word}
    if lexicon == "place":  # "in the garden"
        entry |= {"at": word, "self": word[word.index("the ") :]}
    entry |= {
        "a" if key == "self" else f"{key}.a": _with_article(value)
        for key, value in list(entry.items())
    }
    capitals = {key[0].upper() + key[1:]: v[0].upper() + v[1:] for key, v in entry.items()}
    return entry | capitals


class Template:
    """A sentence pattern: literal text and slots."""

    def __init__(self, text: str):
        self.text, self.parts, end = text, [], 0
        for match in _SLOT.finditer(text):
            name, digit, path = match.groups()
            lexicon = "name" if name in NAME_SLOTS else name
            self.parts += [text[end : match.start()], (name + digit, lexicon, path[1:] or "self")]
            end = match.end()
        self.parts.append(text[end:])
        self.slots = [part for part in self.parts if not isinstance(part, str)]
        self.names = {slot[0] for slot in self.slots}
        self.is_single = len(split_sentences(text)) == 1

    def render(self, binding: "Binding") -> str:
        """The sentence with every slot filled, drawing what is not bound yet."""
        return "".join(
            part if isinstance(part, str) else binding.entry(part[0], part[1])[part[2]]
            for part in self.parts
        )


class Binding:
    """What the slots of a text stand for; two slots of one lexicon never mean the same word."""

    def __init__(self, grammar: "Grammar", rng: random.Random, used: dict | None = None):
        self.grammar, self.rng = grammar, rng
        self.bound: dict[str, dict[str, str]] = {}
        self.used: dict[str, set[str]] = {} if used is None else used

    def entry(self, slot: str, lexicon: str) -> dict[str, str]:
        """The entry bound to a slot."""
        if slot not in self.bound:
            entries, taken = self.grammar.lexicons[lexicon], self.used.get(lexicon, ())
            entry = self.rng.choice(entries)
            while entry["self"] in taken:
                entry = self.rng.choice(entries)
            self.bind(slot, lexicon, entry)
        return self.bound[slot]

    def bind(self, slot: str, lexicon: str, entry: dict[str, str]) -> None:
        """Fixes a slot."""
        self.bound[slot] = entry
        self.used.setdefault(lexicon, set()).add(entry["self"])

    def number(self, **values: int) -> "Binding":
        """Fixes number slots."""
        for slot, value in values.items():
            self.bound[slot] = {"self": str(value)}
        return self

    def copy(self) -> "Binding":
        """An independent copy to try a sentence with."""
        other = Binding(self.grammar, self.rng, {key: set(v) for key, v in self.used.items()})
        other.bound = dict(self.bound)
        return other

    def take(self, trial: "Binding") -> None:
        """Keeps what a copy bound; `used` may be shared with other bindings, so it stays."""
        self.bound = trial.bound
        for lexicon, words in trial.used.items():
            self.used.setdefault(lexicon, set()).update(words)


@dataclasses.dataclass
class Section:
    """A plot, a fact or a piece of small talk with its questions."""

    beats: list[list[Template]] = dataclasses.field(default_factory=list)
    asks: list[tuple[list[Template], list[Template]]] = dataclasses.field(default_factory=list)
    requests: list[Template] = dataclasses.field(default_factory=list)


class Grammar:
    """`tiny_grammar.txt`, parsed; its first lines describe the format."""

    def __init__(self, path: Path = GRAMMAR):
        self.lexicons: dict[str, list[dict[str, str]]] = {"n": []}
        self.rules: dict[str, list[Template]] = {}
        self.plots: dict[str, Section] = {}
        self.facts: dict[str, Section] = {}
        self.talks: list[tuple[list[Template], list[Template]]] = []
        self.trivia: list[tuple[list[Template], list[Template]]] = []
        self.requests: list[Template] = []
        section, target, forms = Section(), [], {}
        for line in path.read_text(encoding="utf-8").splitlines():
            word, _, rest = line.partition(" ")
            if not line or line.startswith("#"):
                continue
            if word == "lexicon":
                name, *pairs = rest.split()
                forms = dict(pair.split("=") for pair in pairs)
                target = self.lexicons.setdefault(name, [])
            elif word == "rule":
                target = self.rules.setdefault(rest, [])
            elif word in ("plot", "fact"):
                section, target = Section(beats=[[]] * (word == "fact")), []
                (self.plots if word == "plot" else self.facts)[rest] = section
                if word == "fact":
                    section.beats = [target]
            elif line == "beat":
                section.beats.append(target := [])
            elif word == "beat":
                section.beats.append(self.rules[rest])
            elif line in ("request", "request any"):
                target = section.requests if line == "request" else self.requests
            elif word in (asked := {"ask": section.asks, "talk": self.talks, "know": self.trivia}):
                questions = [Template(question) for question in rest.split(" | ")]
                asked[word].append((questions, target := []))
            elif any(target is entries for entries in self.lexicons.values()):
                target += [_entry(name, item.strip(), forms) for item in line.split(",")]
            else:
                target.append(Template(line))
        self.constants = {
            sentence
            for template in self.templates()
            if not template.slots
            for sentence in split_sentences(template.text)
        }
        self.words = sorted(
            {w for t in self.templates() for w in re.findall(r"[a-z]{3,}", _SLOT.sub("", t.text))}
            | {w for e in self.lexicons.values() for f in e for w in f["self"].split()}
        )

    def templates(self) -> Iterable[Template]:
        """All patterns."""
        asks = [ask for s in (*self.plots.values(), *self.facts.values()) for ask in s.asks]
        for questions, answers in asks + self.talks + self.trivia:
            yield from (*questions, *answers)
        for section in (*self.plots.values(), *self.facts.values()):
            yield from (t for beat in section.beats for t in beat)
            yield from section.requests
        yield from (t for rule in self.rules.values() for t in rule)
        yield from self.requests

    def is_held_out(self, sentence: str) -> bool:
        """Whether training must never show this sentence."""
        held = zlib.crc32(b"tiny" + sentence.encode()) % _HELD_OUT_OF == 0
        return held and sentence not in self.constants


@functools.cache
def grammar() -> Grammar:
    """The grammar in the repository."""
    return Grammar()


class Recogniser:
    """Decides whether a sentence follows the grammar, with agreement between its slots."""

    _NUMBERS = re.compile(r"\d+(, \d+)*\.")

    def __init__(self, language: Grammar):
        self.language = language
        pieces = {s for t in language.templates() for s in split_sentences(t.text)}
        self.templates = [Template(piece) for piece in sorted(pieces)]

    @functools.cache  # noqa: B019
    def accepts(self, sentence: str) -> bool:
        """Whether some pattern of the grammar produces the sentence."""
        return bool(self._NUMBERS.fullmatch(sentence)) or any(
            self._produces(template, sentence)
            for template in self.templates
            if sentence.startswith(template.parts[0]) and sentence.endswith(template.parts[-1])
        )

    def _produces(self, template: Template, sentence: str) -> bool:
        match = self._pattern(template).fullmatch(sentence)
        if match is None:
            return False
        found: dict[str, list[tuple[str, str, str]]] = {}
        for (slot, lexicon, form), text in zip(template.slots, match.groups(), strict=True):
            found.setdefault(slot, []).append((lexicon, form, text))
        return all(self._agree(uses) for uses in found.values())

    def _agree(self, uses: list[tuple[str, str, str]]) -> bool:
        lexicon = uses[0][0]
        if lexicon == "n":
            return len({text for _, _, text in uses}) == 1
        entries = self.language.lexicons[lexicon]
        return any(all(entry[form] == text for _, form, text in uses) for entry in entries)

    @functools.cache  # noqa: B019
    def _pattern(self, template: Template) -> re.Pattern:
        return re.compile(
            "".join(
                re.escape(part) if isinstance(part, str) else self._alternatives(*part[1:])
                for part in template.parts
            )
        )

    @functools.cache  # noqa: B019
    def _alternatives(self, lexicon: str, form: str) -> str:
        if lexicon == "n":
            return r"(\d+)"
        values = {entry[form] for entry in self.language.lexicons[lexicon]}
        return f"({'|'.join(sorted(map(re.escape, values), key=len, reverse=True))})"
