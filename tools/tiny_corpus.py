"""What `tiny` learns from: seeded stories, questions and chats.

`Writer` draws exchanges (a question and its one right answer) and stories from the grammar;
`document` makes training texts of them.

The split is by sentence: one in 16, by checksum, is held out. A training text contains no such
sentence, a held-out prompt contains nothing else. Exempt are sentences of the grammar without a
slot ("The end."), thoughts and answers of a word or two; none of them is in a held-out prompt.
Imports nothing of carat_jax.
"""

import dataclasses
import random
from collections.abc import Callable, Sequence

from tools.tiny_grammar import (
    NAME_SLOTS,
    Binding,
    Section,
    Template,
    grammar,
    split_sentences,
)

_SYLLABLES = (
    "ba be bo da do du fa fi ga go ka ki ko la li lo ma mi mo na ni no ra ri ro sa ta vi zu"
)
_GLYPHS = "éüñçøßłж你好日本한글😀🦊🌙€½→"
THOUGHT = "<|channel>thought\n{}\n<channel|>"


class Retry(Exception):
    """No allowed sentence can be built from what is already fixed: start the text again."""


@dataclasses.dataclass
class Exchange:
    """A question with its one right answer, the same in few words, and how to find it.

    `text` is the part of the question that states facts, if it has one.
    """

    question: str
    answer: str
    brief: str = ""
    thought: str = ""
    text: str = ""


class Writer:
    """Draws texts from the grammar, on one side of the split.

    Args:
      rng: the only source of chance.
      held_out: whether prompts contain held-out sentences only, or nothing at all contains one.
    """

    def __init__(self, rng: random.Random, held_out: bool = False):
        self.rng, self.held_out, self.language = rng, held_out, grammar()
        self.tasks: list[tuple[int, Callable[[], Exchange | list[Exchange]]]] = [
            (45, self.reading),
            (24, self.arithmetic),
            (14, self.numbers),
            (7, self.ranking),
            (10, self.copying),
        ]

    def binding(self, used: dict | None = None) -> Binding:
        """A fresh binding; in training now and then with an invented name, to be copied."""
        binding = Binding(self.language, self.rng, used)
        if not self.held_out and self.rng.random() < 0.08:
            forms = dict(self.rng.choice(self.language.lexicons["name"]))
            binding.bind("A", "name", forms | {"self": self.invented()})
        return binding

    def invented(self) -> str:
        """A name that no list holds."""
        word = "".join(self.rng.choice(_SYLLABLES.split()) for _ in range(self.rng.randint(2, 3)))
        return (word + self.rng.choice(["", "n", "r", "x", "l", "s", "th"])).capitalize()

    def allows(self, text: str) -> bool:
        """Whether every sentence lies on this writer's side of the split."""
        return all(self.language.is_held_out(s) == self.held_out for s in split_sentences(text))

    def prompt(self, templates: Sequence[Template], binding: Binding) -> str:
        """A sentence of a prompt: on this writer's side of the split."""
        for _ in range(100):
            trial, template = binding.copy(), self.rng.choice(templates)
            text = template.render(trial)
            if template.is_single:
                fits = self.language.is_held_out(text) == self.held_out
            else:
                fits = self.allows(text)
            if fits:
                binding.take(trial)
                return text
        raise Retry

    def reply(self, templates: Sequence[Template], binding: Binding) -> str:
        """A sentence of an answer: any, to a held-out prompt; in training never a held-out one."""
        if self.held_out:
            return self.rng.choice(templates).render(binding)
        return self.prompt(templates, binding)

    def ask(self, rule: str, binding: Binding) -> str:
        """A prompt sentence by a rule of the grammar."""
        return self.prompt(self.language.rules[rule], binding)

    def answer(self, rule: str, binding: Binding) -> str:
        """A reply by a rule of the grammar."""
        return self.reply(self.language.rules[rule], binding)

    def exchange(self) -> Exchange:
        """A question of some kind."""
        return self.exchanges()[0]

    def exchanges(self) -> list[Exchange]:
        """Questions of some kind: several about one text, or one."""
        weights, tasks = zip(*self.tasks, strict=True)
        while True:
            drawn = self._persist(self.rng.choices(tasks, weights)[0])
            drawn = drawn if isinstance(drawn, list) else [drawn]
            if self.held_out or all(self.allows(exchange.answer) for exchange in drawn):
                return drawn

    @staticmethod
    def _persist(draw: Callable):
        while True:
            try:
                return draw()
            except Retry:
                continue

    def story(self) -> tuple[str, Section, Binding]:
        """A story in three paragraphs, its plot and its binding."""
        plot, binding = self.rng.choice(list(self.language.plots.values())), self.binding()
        lines = [self.reply(beat, binding) for beat in plot.beats]
        if self.rng.random() < 0.3:
            lines.append("The end.")
        third = len(lines) // 3
        parts = lines[:third], lines[third : 2 * third], lines[2 * third :]
        return "\n\n".join(" ".join(part) for part in parts), plot, binding

    def story_exchanges(self) -> list[Exchange]:
        """A request for a story, the story, and up to two questions about it."""
        text, plot, binding = self.story()
        told = {slot for slot, entry in binding.bound.items() if entry["self"] in text}
        requests = [r for r in plot.requests * 2 + self.language.requests if r.names <= told]
        thought = f"I will tell a story about {binding.bound['A']['self']}."
        exchanges = [Exchange(self.prompt(requests, binding), text, thought=thought)]
        asks = [ask for ask in plot.asks if (ask[0][0].names | ask[1][0].names) <= told]
        self.rng.shuffle(asks)
        for questions, answers in asks[: self.rng.choice([0, 0, 1, 2])]:
            question, answer = self.prompt(questions, binding), self.reply(answers, binding)
            exchanges.append(Exchange(question, answer, self._brief(questions, answers, binding)))
        return exchanges

    def reading(self) -> list[Exchange]:
        """A text of two to five facts, and questions about some of them, the first with the text.

        A held-out question has its words chosen first: they leave less choice than a statement's.
        """
        facts = list(self.language.facts.values())
        others = self.rng.sample(facts, self.rng.randint(2, 4))
        # Two facts of one kind make sure that the question must be read.
        chosen = others + others[:1] * (self.rng.random() < 0.3)
        bindings, asks, used, num_asked = [], [], {}, self.rng.choice([1, 2, 3])
        for index, fact in enumerate(chosen):
            bindings.append(self.binding(used))
            asks.append(self.rng.choice(fact.asks))
            if index < (1 if self.held_out else num_asked):
                asks[-1] += (self.prompt(asks[-1][0], bindings[-1]),)
        statements = [
            self.prompt(fact.beats[0], binding)
            for fact, binding in zip(chosen, bindings, strict=True)
        ]
        exchanges = []
        for binding, ask, truth in zip(bindings, asks, statements, strict=True):
            if len(ask) == 3:
                answer, brief = self.reply(ask[1], binding), self._brief(*ask[:2], binding)
                exchanges.append(Exchange(ask[2], answer, brief, f"The text says: {truth}"))
        self.rng.shuffle(statements)
        self.rng.shuffle(exchanges)
        text = " ".join(statements)
        exchanges[0].text, exchanges[0].question = text, f"{text} {exchanges[0].question}"
        return exchanges

    def _brief(self, questions: list[Template], answers: list[Template], binding: Binding) -> str:
        """The words of the answer that the question did not have."""
        new = [slot for slot in answers[0].slots if slot[0] not in questions[0].names]
        slot, lexicon, form = (new or answers[0].slots)[-1]
        text = binding.entry(slot, lexicon)[form]
        return f"{text[0].upper()}{text[1:]}."

    def arithmetic(self) -> Exchange:
        """A sum or difference, bare or in words."""
        # The shipped weights saw the sentences of word problems on both sides of the split.
        in_words = self.rng.random() < 0.4 and not self.held_out
        is_sum = self.rng.random() < 0.5
        first, second = self.rng.choices(range(2, 21) if in_words else range(51), k=2)
        if not is_sum:
            first, second = max(first, second) + in_words * 2, min(first, second)
        total, sign = (first + second, "+") if is_sum else (first - second, "-")
        binding = self.binding().number(n=first, n2=second, n3=total)
        thought = f"{first} {sign} {second} = {total}"
        if in_words:
            text = self.ask("gain" if is_sum else "loss", binding)
            question = self.ask("how_many", binding)
            answer = self.answer("how_many_answer", binding)
            return Exchange(f"{text} {question}", answer, f"{total}.", thought, text)
        rule = "plus" if is_sum else "minus"
        question = self.ask(rule, binding)
        return Exchange(question, self.answer(f"{rule}_answer", binding), f"{total}.", thought)

    def numbers(self) -> Exchange:
        """Counting, neighbours, comparing and ordering."""
        kind = self.rng.choice(["count", "after", "before", "bigger", "smaller", "order"])
        first, second = self.rng.sample(range(1, 100), 2)
        if kind == "order":
            several = self.rng.sample(range(1, 100), self.rng.randint(3, 5))
            question = f"Put these numbers in order: {', '.join(map(str, several))}."
            if not self.allows(question):
                raise Retry
            ordered = ", ".join(map(str, sorted(several)))
            return Exchange(question, f"{ordered}.", f"{ordered}.")
        if kind == "count":
            second = first + self.rng.randint(3, 12)
            counted = ", ".join(map(str, range(first, second + 1)))
            question = self.ask(kind, self.binding().number(n=first, n2=second))
            return Exchange(question, f"{counted}.", f"{counted}.")
        low, high = sorted((first, second))
        values = {
            "after": {"n2": first + 1},
            "before": {"n2": first - 1},
            "bigger": {"n2": second, "n3": high, "n4": low},
            "smaller": {"n2": second, "n3": low, "n4": high},
        }[kind]
        binding = self.binding().number(n=first, **values)
        brief = values["n3"] if "n3" in values else values["n2"]
        return Exchange(
            self.ask(kind, binding), self.answer(f"{kind}_answer", binding), f"{brief}."
        )

    def ranking(self) -> Exchange:
        """Who of three is the tallest?"""
        top = Binding(self.language, self.rng)
        statements = [self.ask("compare", top)]
        compare, people = top.bound["compare"], [top.bound["A"], top.bound["B"]]
        bottom = Binding(self.language, self.rng, top.used)
        bottom.bound = {"compare": compare, "A": people[1]}
        statements.append(self.ask("compare", bottom))
        people.append(bottom.bound["B"])

        def about(order: Sequence[dict[str, str]]) -> Binding:
            binding = Binding(self.language, self.rng)
            binding.bound = {"compare": compare, **dict(zip(NAME_SLOTS, order, strict=False))}
            return binding

        self.rng.shuffle(statements)
        which, text = self.rng.choice(["most", "least"]), " ".join(statements)
        question = self.ask(which, about(self.rng.sample(people, 3)))
        winner = people[0 if which == "most" else 2]
        answer = self.answer(f"{which}_answer", about([winner]))
        return Exchange(f"{text} {question}", answer, f"{winner['self']}.", text=text)

    def copying(self) -> Exchange:
        """Repeats a text, or finds a word in a list."""
        draw = self.rng.random()
        if draw < 0.3:
            words = [e["self"] for e in self.rng.sample(self.language.lexicons["thing"], 4)]
            nth = self.rng.randrange(4)
            binding = self.binding()
            binding.bound["nth"] = self.language.lexicons["nth"][nth]
            binding.bound["thing"] = {"self": words[nth]}
            binding.bound["list"] = {"self": ", ".join(words)}
            question, answer = self.ask("nth", binding), self.answer("nth_answer", binding)
            return Exchange(question, answer, f"{words[nth].capitalize()}.")
        if draw < 0.6:
            fact = self.rng.choice(list(self.language.facts.values()))
            text = self.reply(fact.beats[0], self.binding())
        else:
            words = self.rng.choices(self.language.words, k=self.rng.randint(2, 6))
            if draw > 0.8:
                words[0] = self.invented()
            if draw > 0.95:
                words[1] = "".join(self.rng.choices(_GLYPHS, k=2))
            text = " ".join(words)
        question = f"{self.rng.choice(['Repeat', 'Say this again', 'Repeat this'])}: {text}"
        if not self.allows(question):
            raise Retry
        return Exchange(question, text, text)

    def talk(self) -> Exchange:
        """Small talk."""
        questions, answers = self.rng.choice(self.language.talks)
        return Exchange(self.rng.choice(questions).text, self.rng.choice(answers).text)

    def trivia(self) -> Exchange:
        """A question of general knowledge."""
        questions, answers = self.rng.choice(self.language.trivia)
        answer = self.rng.choice(answers).text
        return Exchange(self.rng.choice(questions).text, answer, answer)

    def unknown(self) -> Exchange:
        """A question beyond the model, about some topic or an invented word."""
        binding = self.binding()
        if self.rng.random() < 0.5:
            words = [self.invented().lower(), *self.rng.sample(self.language.words, 2)]
            binding.bound["topic"] = {"self": " ".join(words[: self.rng.randint(1, 3)])}
        question = self.ask("unknown", binding)
        return Exchange(question, self.answer("unknown_answer", binding))

    def memory(self) -> list[Exchange]:
        """Somebody says something, talks of other things, and asks for it later."""
        what = self.rng.choice(["name", "name", "taste"])
        binding = Binding(self.language, self.rng)
        if what == "name" and self.rng.random() < 0.4:
            forms = dict(self.rng.choice(self.language.lexicons["name"]))
            binding.bind("A", "name", forms | {"self": self.invented()})
        first = Exchange(self.ask(what, binding), self.answer(f"{what}_answer", binding))
        between = [self.exchange() for _ in range(self.rng.randint(0, 2))]
        key = binding.bound["A" if what == "name" else "colour"]["self"]
        last = Exchange(
            self.ask(f"my_{what}", binding), self.answer(f"my_{what}_answer", binding), f"{key}."
        )
        return [first, *between, last]

    def persona(self) -> tuple[str, list[Exchange]]:
        """A system message that gives the model a name, and what follows from it."""
        binding = self.binding()
        system = self.ask("persona", binding)
        hello, who = self.language.talks[0][0], self.language.talks[1][0]
        exchanges = [
            Exchange(self.rng.choice(hello).text, self.answer("persona_hello", binding)),
            Exchange(self.rng.choice(who[:4]).text, self.answer("persona_answer", binding)),
        ]
        return system, self.rng.sample(exchanges, self.rng.randint(1, 2))


def chat(writer: Writer) -> tuple[str, list[Exchange]]:
    """A conversation: its system message (empty if none) and its exchanges."""
    rng, draw, system = writer.rng, writer.rng.random(), ""
    if draw < 0.22:
        exchanges = writer.story_exchanges()
    elif draw < 0.82:
        exchanges = [e for _ in range(rng.choice([1, 1, 2])) for e in writer.exchanges()]
    elif draw < 0.90:
        exchanges = writer.memory()
    elif draw < 0.93:
        system, exchanges = writer.persona()
    else:
        kinds = [writer.talk, writer.talk, writer.trivia, writer.unknown]
        exchanges = [rng.choice(kinds)() for _ in range(rng.randint(1, 3))]
    if not system:
        if rng.random() < 0.12:
            exchanges.insert(0, writer.talk())
        if rng.random() < 0.10:
            exchanges.append(rng.choice([writer.talk, writer.trivia, writer.exchange])())
        if rng.random() < 0.08:
            exchanges = [dataclasses.replace(e, answer=e.brief or e.answer) for e in exchanges]
            system = writer.ask("brief", writer.binding())
        elif rng.random() < 0.08:
            system = "You are a helpful assistant."
    return system, [
        dataclasses.replace(e, question=_casual(e.question)) if rng.random() < 0.08 else e
        for e in exchanges
    ]


def _casual(question: str) -> str:
    """A question as people type it in a hurry."""
    return question[0].lower() + question[1:].rstrip(".!?")


def messages_of(system: str, exchanges: Sequence[Exchange]) -> list[dict[str, str]]:
    """The conversation up to the last question, as chat messages."""
    messages = [{"role": "system", "content": system}] if system else []
    for exchange in exchanges:
        messages.append({"role": "user", "content": exchange.question})
        messages.append({"role": "assistant", "content": exchange.answer})
    return messages[:-1]


def document(writer: Writer, render: Callable[..., str]) -> str:
    """One training text, `<bos>` included: a story, a plain question, or a conversation.

    Args:
      writer: where it comes from.
      render: the chat template.
    """
    while True:
        try:
            return _document(writer, render)
        except Retry:
            continue


def _document(writer: Writer, render: Callable[..., str]) -> str:
    draw = writer.rng.random()
    if draw < 0.12:
        return f"<bos>{writer.story()[0]}\n<eos>"
    if draw < 0.18:
        system, (first, *_) = chat(writer)
        if system:
            raise Retry
        return f"<bos>{first.question}\n{first.answer}\n<eos>"
    if draw < 0.28:
        exchange = writer.exchange()
        return f"<bos>{plain_question(exchange)} {exchange.answer}\n<eos>"
    system, exchanges = chat(writer)
    is_thinking = writer.rng.random() < 0.12
    text = render(
        messages=messages_of(system, exchanges),
        bos_token="<bos>",
        add_generation_prompt=True,
        enable_thinking=is_thinking,
    )
    thought = THOUGHT.format(exchanges[-1].thought or "This is easy.") if is_thinking else ""
    return f"{text}{thought}{exchanges[-1].answer}<turn|>\n"


def plain_question(exchange: Exchange) -> str:
    """The question as running text that asks for its answer."""
    question = exchange.question.removeprefix(exchange.text).strip()
    return f"{exchange.text}\nQuestion: {question}\nAnswer:".lstrip()
