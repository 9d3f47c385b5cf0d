"""Prompts in and texts out: what the program reads from prompt files and writes to output files.

A prompt file that ends in `.jsonl` has one object a line, {"prompt": "..."} or {"messages": [...]},
optionally with "tools", an "id" that is passed through, and any sampling parameter
("temperature": 0.2). In any other file each line that is not blank is a prompt. A refusal names
file and line. Imports `config` and the standard library.
"""

import dataclasses
import json
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from carat_jax.config import SamplingParams, sampling_from


@dataclasses.dataclass(frozen=True)
class Job:
    """One prompt (text) or conversation (messages), and what it asks for.

    Attributes:
      index: its place in the order of the prompts.
      where: what a refusal of it begins with, such as "prompts.jsonl:3".
      sampling: sampling parameters that differ from the settings.
      extra: what is copied to its output records.
    """

    index: int
    where: str
    prompt: str | None = None
    messages: Sequence[Mapping[str, Any]] | None = None
    tools: Sequence[Mapping[str, Any]] | None = None
    sampling: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    extra: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def is_chat(self) -> bool:
        """Whether it goes through the chat template."""
        return self.messages is not None

    def as_chat(self) -> "Job":
        """The same with its prompt as the message of a user."""
        if self.is_chat:
            return self
        messages = [{"role": "user", "content": self.prompt}]
        return dataclasses.replace(self, prompt=None, messages=messages)

    def echo(self) -> dict[str, Any]:
        """The part of an output record that says what was asked."""
        asked = {"messages": self.messages} if self.is_chat else {"prompt": self.prompt}
        return {**self.extra, **asked}


def read_prompts(path: str, first: int) -> list[Job]:
    """The jobs of a prompt file, numbered from `first`; ValueError names file and line."""
    try:
        lines = Path(path).read_text(encoding="utf-8-sig").split("\n")
    except OSError as error:
        raise ValueError(f"--prompt_file: {path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ValueError(f"--prompt_file: {path}: is not UTF-8 text") from None
    parse = _job_of_json if path.endswith(".jsonl") else _job_of_text
    jobs: list[Job] = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            jobs.append(parse(first + len(jobs), f"{path}:{number}", line.rstrip("\r")))
    if not jobs:
        raise ValueError(f"--prompt_file: {path}: has no prompt")
    return jobs


def _job_of_text(index: int, where: str, line: str) -> Job:
    return Job(index, where, prompt=line)


def _unique(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        twice = next(key for key, _ in pairs if [k for k, _ in pairs].count(key) > 1)
        raise ValueError(f"{twice!r} is given twice")
    return found


def _job_of_json(index: int, where: str, line: str) -> Job:
    try:
        fields = json.loads(line, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where}: not valid JSON: {error}") from None
    if not isinstance(fields, dict) or ("prompt" in fields) == ("messages" in fields):
        raise ValueError(f'{where}: must be an object with either "prompt" or "messages"')
    prompt, messages = fields.pop("prompt", None), fields.pop("messages", None)
    tools = fields.pop("tools", None)
    extra = {"id": fields.pop("id")} if "id" in fields else {}
    if messages is None and not isinstance(prompt, str):
        raise ValueError(f"{where}: prompt: {prompt!r} is not text")
    if messages is None and tools is not None:
        raise ValueError(f'{where}: tools: only "messages" can have tools')
    sampling_from(SamplingParams(), where, **fields)
    return Job(index, where, prompt, messages, tools, fields, extra)


class TextSink:
    """Texts in the order of the prompts, each ending in a line break, a blank line between."""

    def __init__(self, file: TextIO):
        self._file = file
        self._waiting: dict[int, list[str]] = {}
        self._next = 0

    def write(self, job: Job, result: Any) -> None:
        """Takes the finished samples of a prompt; writes what is next in order."""
        self._waiting[job.index] = [output.text for output in result.outputs]
        while self._next in self._waiting:
            self._put(self._waiting.pop(self._next))

    def close(self) -> None:
        """Writes what still waits for an earlier prompt, then flushes."""
        for index in sorted(self._waiting):
            self._put(self._waiting[index])
        self._waiting.clear()
        self._file.flush()

    def _put(self, texts: Sequence[str]) -> None:
        for i, text in enumerate(texts):
            between = "\n" if self._next or i else ""
            self._file.write(between + text + ("" if text.endswith("\n") else "\n"))
        self._file.flush()
        self._next += 1


class JsonSink:
    """One JSON object a sample, as soon as its prompt is finished; "index" counts the prompts."""

    def __init__(self, file: TextIO):
        self._file = file

    def write(self, job: Job, result: Any) -> None:
        """Writes the finished samples of a prompt."""
        for output in result.outputs:
            record = {"index": job.index, "sample": output.index, **job.echo(), "text": output.text}
            if output.thought:
                record["thought"] = output.thought
            record |= {"finish_reason": output.finish_reason, "seed": output.seed}
            record |= {"num_prompt_tokens": len(result.prompt_ids), "ids": output.ids}
            if output.logprobs is not None:
                record["logprobs"] = [_logprob(info) for info in output.logprobs]
            record["seconds"] = dataclasses.asdict(result.timings)
            self._file.write(json.dumps(record, ensure_ascii=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Flushes."""
        self._file.flush()


def _logprob(info: Any) -> dict[str, Any]:
    top = [[i, p if math.isfinite(p) else None] for i, p in info.top]  # JSON has no infinity
    return {"logprob": info.logprob if math.isfinite(info.logprob) else None, "top": top}


_SINKS = {".txt": TextSink, ".jsonl": JsonSink}


def check_output(path: str | None) -> None:
    """Refuses an output file of an unknown kind, and one that holds something already."""
    if path is None:
        return
    if Path(path).suffix not in _SINKS:
        raise ValueError(f"--output: {path}: must end in .txt or .jsonl")
    if Path(path).is_file() and Path(path).stat().st_size:
        raise ValueError(f"--output: {path}: holds something already; remove it or name another")


def open_output(path: str | None) -> TextSink | JsonSink:
    """The sink for a .txt or .jsonl file, or for stdout."""
    if path is None:
        return TextSink(sys.stdout)
    check_output(path)
    try:
        return _SINKS[Path(path).suffix](open(path, "w", encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"--output: {path}: cannot be written: {error.strerror}") from None
