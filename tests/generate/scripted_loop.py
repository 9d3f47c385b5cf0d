"""A loop that answers from a table: real requests, tokenizer and text streams, but no model."""

import json
from pathlib import Path

from carat_jax.engine.request import Request, TokenInfo


class ScriptedLoop:
    """Answers the prompt "x" with `answers["x"]`, two requests at a time, one token a step."""

    def __init__(self, tokenizer, answers, interrupt_at):
        self.tokenizer, self.answers, self.interrupt_at = tokenizer, answers, interrupt_at
        self.requests, self.prompts, self.num_steps = [], [], 0

    @property
    def room(self):
        return 2 - sum(not request.is_finished for request in self.requests)

    @property
    def is_idle(self):
        return all(request.is_finished for request in self.requests)

    @property
    def limits(self):
        return self

    def check(self, ids, params):
        if len(ids) > 40:
            raise ValueError(f"prompt: {len(ids)} tokens leave no room for an answer")

    def submit(self, ids, params, is_chat):
        assert self.is_idle or params.n <= self.room
        self.prompts.append(self.tokenizer.decode(ids))
        request = Request(
            ids,
            params,
            seed=7 if params.seed is None else params.seed,
            budget=params.max_tokens,
            end_ids=self.tokenizer.eos_ids,
            tokenizer=self.tokenizer,
            is_chat=is_chat,
        )
        self.requests.append(request)
        return request

    def compile_ahead(self, requests):
        assert self.is_idle  # before anything runs
        self.compiled_for = [(len(ids), params.max_tokens) for ids, params in requests]

    def step(self):
        self.num_steps += 1
        if self.num_steps == self.interrupt_at:
            raise KeyboardInterrupt
        for request, prompt in zip(self.requests, self.prompts, strict=True):
            for sample in request.samples:
                if not sample.is_finished:
                    answer = self.tokenizer.encode(self.answers[prompt])[1:]
                    token = [*answer, self.tokenizer.eos_ids[0]][len(sample.ids)]
                    wants_logprobs = request.params.logprobs is not None
                    top = ((token, -0.5), (0, float("-inf")))
                    sample.push(token, TokenInfo(-0.5, top) if wants_logprobs else None)

    def cancel(self, request):
        for sample in request.samples:
            sample.cancel()


class ScriptedEngine:
    def __init__(self, settings, loop):
        self.settings, self.config = settings, settings.build()
        self.loop, self.tokenizer = loop, loop.tokenizer

    def describe(self):
        return "device: scripted"

    def stats(self):
        return {"drafted": [4, 4], "mean_accepted_length": 2.25}


def records_of(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
