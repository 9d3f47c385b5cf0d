"""The command: `python -m carat_jax.generate --config configs/tiny.yaml --prompt "..."`.

Generated text alone goes to stdout (or to --output), everything else to stderr. Exit codes: 0 done,
2 for input that cannot be used (one line that starts with `error:`), 1 for logits that are NaN (the
other prompts are finished first) and for an output that cannot be written, 130 after Ctrl-C, which
leaves what was produced until then. All input is checked before the first token is generated.

Prompt files: `.jsonl` has one object a line, {"prompt": "..."} or {"messages": [...]}, optionally
with any sampling parameter ("temperature": 0.2), "tools", and an "id" that is passed through.
In any other file each line that is not blank is a prompt.
"""

import contextlib
import functools
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from absl import flags
from tqdm import tqdm

import carat_jax
from carat_jax.config import SamplingParams, read_settings, sampling_from
from carat_jax.engine.feeding import feed, raise_errors
from carat_jax.engine.request import Request
from carat_jax.prompt_files import (
    Job,
    JsonSink,
    TextSink,
    check_output,
    open_output,
    read_prompts,
)

BAD_INPUT, INTERRUPTED = 2, 130


def _flags() -> flags.FlagValues:
    known = flags.FlagValues()
    own = {"flag_values": known}
    flags.DEFINE_string("config", None, "YAML file of settings, e.g. configs/tiny.yaml.", **own)
    flags.DEFINE_multi_string("set", [], "A setting, e.g. sampling.top_k=5; repeatable.", **own)
    flags.DEFINE_string("model", None, "Shorthand of --set model=..., before any --set.", **own)
    flags.DEFINE_multi_string("prompt", [], "Text to complete; repeatable.", **own)
    flags.DEFINE_string("prompt_file", None, "Prompts: .jsonl, or text with one a line.", **own)
    flags.DEFINE_boolean(
        "chat",
        False,
        "Prompts are user messages in the model's chat format. Without prompts: a conversation, "
        "one line of stdin a turn.",
        **own,
    )
    flags.DEFINE_boolean(
        "thinking", False, "Chat models think first; --stream shows it on stderr.", **own
    )
    flags.DEFINE_boolean("stream", False, "Write text as it is made, prompt by prompt.", **own)
    flags.DEFINE_string("output", None, "A .txt or .jsonl file instead of stdout.", **own)
    flags.DEFINE_boolean("print_config", False, "Print settings and their origins; stop.", **own)
    flags.DEFINE_boolean("help", False, "Print this.", **own)
    return known


class Run:
    """Serves jobs on an engine and hands what they produce to a sink.

    Args:
      engine: from `carat_jax.load`.
      new_sink: opens what takes finished results; None if streaming shows them already.
      thinking: whether chat models think first.
      stream: write to stdout while generating, one prompt at a time.
    """

    def __init__(self, engine: Any, new_sink: Callable | None, thinking: bool, stream: bool):
        self._engine, self._new_sink = engine, new_sink
        self._sink: TextSink | JsonSink | None = None
        self._thinking, self._stream = thinking, stream
        self._shown = 0  # index of the prompt whose text is on the screen
        self.num_done = self.num_ids = 0

    def prepare(self, job: Job) -> tuple[list[int], SamplingParams]:
        """Ids and sampling parameters of a job that can be served; ValueError says why not."""
        tokenizer = self._engine.tokenizer
        params = sampling_from(self._engine.config.sampling, job.where, **job.sampling)
        if self._stream and params.n != 1:
            raise ValueError(f"{job.where}: sampling.n: {params.n} samples cannot be streamed")
        try:
            if job.is_chat:
                ids = tokenizer.encode_chat(job.messages, thinking=self._thinking, tools=job.tools)
            else:
                ids = tokenizer.encode(job.prompt)
            self._engine.loop.limits.check(ids, params)
        except ValueError as error:
            raise ValueError(f"{job.where}: {error}") from None
        return ids, params

    def serve(self, jobs: Sequence[Job]) -> list[Any]:
        """Runs all jobs, in the order given where they compete; their results.

        Logits that are NaN end their sample, and when all else is done raise `LogitsError`. After
        Ctrl-C the unfinished are cancelled, and what they have so far goes to the sink too.
        """
        work = [(*self.prepare(job), job.is_chat) for job in jobs]
        # Only now: no refusal leaves an empty file behind.
        if self._sink is None and self._new_sink is not None:
            self._sink = self._new_sink()
        self._engine.loop.compile_ahead((ids, params) for ids, params, _ in work)
        running: dict[int, Request] = {}
        results: dict[int, Any] = {}
        bar = tqdm(total=len(jobs), unit="prompt", disable=self._stream or None, leave=False)
        most = 1 if self._stream else None
        try:
            with bar, contextlib.closing(feed(self._engine.loop, work, running, most)) as steps:
                for _ in steps:
                    for index, request in running.items():
                        if self._stream:
                            self._show(index, request)
                        if request.is_finished:
                            results[index] = self._finish(jobs[index], request)
                            bar.update()
        finally:
            for index, request in running.items():
                if index not in results and request.result().num_generated:
                    self._finish(jobs[index], request)
        done = [results[i] for i in range(len(jobs))]
        raise_errors(done)
        return done

    def close(self) -> None:
        """Writes what the sink still holds back."""
        if self._sink is not None:
            self._sink.close()

    def _finish(self, job: Job, request: Any) -> Any:
        result = request.result()
        self.num_done += 1
        self.num_ids += result.num_generated
        if self._sink is not None:
            self._sink.write(job, result)
        return result

    def _show(self, index: int, request: Request) -> None:
        """Writes what became final of a prompt that is streamed: text out, thought to stderr."""
        if index > self._shown:
            self._shown = index
            print()  # a blank line between texts, as in a file of them
        deltas = request.samples[0].deltas
        while deltas:
            delta = deltas.popleft()
            print(delta.thought, end="", file=sys.stderr, flush=True)
            print(delta.text, end="", flush=True)
        if request.is_finished and not request.result().text.endswith("\n"):
            print(flush=True)


def converse(run: Run) -> None:
    """A conversation: each line of stdin is a turn, until its end."""
    messages: list[dict[str, str]] = []
    for turn, line in enumerate(_lines_of_stdin()):
        messages.append({"role": "user", "content": line})
        try:
            (result,) = run.serve([Job(turn, f"turn {turn + 1}", messages=tuple(messages))])
        except ValueError as error:
            if not sys.stdin.isatty():
                raise
            _say(f"error: {error}; that turn is forgotten")
            messages.pop()
            continue
        messages.append({"role": "assistant", "content": result.text})


def _lines_of_stdin() -> Iterator[str]:
    is_terminal = sys.stdin.isatty()
    while True:
        if is_terminal:
            print("> ", end="", file=sys.stderr, flush=True)
        try:
            line = input()  # not readline(): on a terminal it can be edited
        except EOFError:
            return
        if line.strip():
            yield line


def _jobs(options: flags.FlagValues) -> list[Job]:
    jobs = [Job(i, f"--prompt {i + 1}", prompt=text) for i, text in enumerate(options.prompt)]
    if options.prompt_file is not None:
        jobs += read_prompts(options.prompt_file, len(jobs))
    if options.chat:
        jobs = [job.as_chat() for job in jobs]
    if not jobs and not options.chat and not options.print_config:
        raise ValueError("nothing to do: give --prompt, --prompt_file or --chat")
    if options.thinking and not (options.chat or any(job.is_chat for job in jobs)):
        raise ValueError('--thinking: only conversations can think; add --chat or use "messages"')
    return jobs


def _generate(arguments: Sequence[str]) -> None:
    options = _flags()
    try:
        extra = options(arguments)[1:]
    except flags.Error as error:
        raise ValueError(str(error).replace("\n", " ")) from None
    if options["help"].value:
        print(__doc__, options.get_help(), sep="\n")
        return
    if extra:
        raise ValueError(f"{extra[0]!r} is not a flag; a prompt is given as --prompt={extra[0]!r}")
    model = [] if options.model is None else [f"model={options.model}"]
    settings = read_settings(options.config, [*model, *options["set"].value])
    jobs = _jobs(options)
    # Imported once the input is known to be good, because jax takes its time.
    from carat_jax.engine import api

    if options.print_config:
        print(api.locate(settings)[2].describe())
        return
    stream = options.stream or not jobs
    if stream and (num_samples := settings.build().sampling.n) != 1:
        what = "--stream" if options.stream else "a conversation"
        raise ValueError(f"sampling.n: {num_samples} samples, but {what} shows one")
    check_output(options.output)
    started = time.monotonic()
    engine = carat_jax.load(settings)
    _say(engine.describe())
    _say(f"loaded in {time.monotonic() - started:.1f} s; --print_config shows where each is from:")
    _say(", ".join(f"{k}={v}" for k, v, origin in engine.settings.items() if origin != "built-in"))
    has_sink = options.output is not None or not stream
    new_sink = functools.partial(open_output, options.output) if has_sink else None
    run = Run(engine, new_sink, options.thinking, stream)
    started = time.monotonic()
    try:
        run.serve(jobs) if jobs else converse(run)
    finally:
        run.close()
        if run.num_done:
            spent = f"{time.monotonic() - started:.1f} s, with compilation"
            plural = "s" if run.num_done > 1 else ""
            found = engine.stats()
            pace = f", {found['mean_accepted_length']:.2f} a pass," if any(found["drafted"]) else ""
            _say(f"{run.num_done} prompt{plural}, {run.num_ids} tokens{pace} in {spent}")


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the program; returns its exit code."""
    if sys.stdout is None:  # started with a closed stdout
        return 1
    try:
        _generate(sys.argv if arguments is None else ["generate", *arguments])
        sys.stdout.flush()
    except (ValueError, NotImplementedError) as error:
        _say(f"error: {error}")
        return BAD_INPUT
    except FloatingPointError as error:
        _say(f"error: {error}")
        return 1
    except KeyboardInterrupt:
        _say("interrupted")
        return INTERRUPTED
    except BrokenPipeError:
        # Whoever read stdout has left. Python would complain again when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        _say(f"error: the output cannot be written: {error.strerror}")
        return 1
    return 0


if __name__ == "__main__":
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING, format="%(message)s")
    logging.getLogger("carat_jax").setLevel(logging.INFO)
    sys.exit(main())
