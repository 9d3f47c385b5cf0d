"""The command: what goes to stdout, to files and to stderr, exit codes, refusals, Ctrl-C.

Most tests run the program in this process on a scripted loop: real requests, tokenizer and text
streams, but tokens from a table instead of a model.
"""

import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import carat_jax
from carat_jax import generate
from carat_jax.config import read_settings
from carat_jax.engine import api
from carat_jax.engine.request import Request, TokenInfo
from carat_jax.engine.tokenizer import Tokenizer
from tests.engine.gemma_like import write_folder

ROOT = Path(__file__).parents[1]
TINY = ROOT / "carat_jax" / "tiny" / "model.safetensors"


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


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return Tokenizer.from_folder(write_folder(tmp_path_factory.mktemp("checkpoint")))


@pytest.fixture
def run(tokenizer, monkeypatch, capsys):
    """Runs the program on a scripted loop: (exit code, stdout, stderr, loop)."""

    def run(*arguments, answers=None, interrupt_at=None, stdin=None):
        loop = ScriptedLoop(tokenizer, answers or {}, interrupt_at)

        def load(settings):
            published = {"temperature": 0.9, "top_k": 64}
            return ScriptedEngine(settings.with_generation_config(published, "published"), loop)

        monkeypatch.setattr(carat_jax, "load", load, raising=False)
        if stdin is not None:
            monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        code = generate.main(list(arguments))
        out, err = capsys.readouterr()
        assert "Traceback" not in err
        return code, out, err, loop

    return run


def records_of(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


# ---- text out ----


def test_only_the_text_goes_to_stdout(run):
    code, out, err, loop = run("--prompt", "the", answers={"the": " thought"})
    assert (code, out) == (0, " thought\n")
    assert loop.prompts == ["the"]
    assert loop.compiled_for == [(2, 256)]
    assert "1 prompt, " in err
    assert "sampling.top_k=64" in err


def test_several_prompts_and_samples_are_in_order_with_a_blank_line_between(run):
    # given a first prompt whose answer takes longest, so that the others finish before it
    answers = {"a": "long long long", "b": "short\n", "c": "mid"}
    arguments = [f"--prompt={prompt}" for prompt in answers]
    code, out, _, _ = run(*arguments, answers=answers)
    assert (code, out) == (0, "long long long\n\nshort\n\nmid\n")
    code, out, _, _ = run(*arguments, "--set=sampling.n=2", answers=answers)
    assert out == "long long long\n\n" * 2 + "short\n\n" * 2 + "mid\n\nmid\n"


def test_streamed_text_equals_the_text_at_once(run):
    answers = {"a": "日本 and the", "b": "thought\n", "c": ""}
    arguments = [f"--prompt={prompt}" for prompt in answers]
    _, at_once, _, _ = run(*arguments, answers=answers)
    _, streamed, _, loop = run(*arguments, "--stream", answers=answers)
    assert streamed == at_once == "日本 and the\n\nthought\n\n\n"
    assert loop.prompts == ["a", "b", "c"]


def test_streamed_text_appears_piece_by_piece(run, monkeypatch):
    written = []
    monkeypatch.setattr(
        "builtins.print", lambda *a, file=None, **k: written.append(a) if file is None else None
    )
    run("--prompt=a", "--stream", answers={"a": "x y z"})
    assert [a[0] for a in written if a and a[0]] == ["x", " ", "y", " ", "z"]


def test_chat_wraps_prompts_as_user_messages(run):
    code, out, _, loop = run(
        "--chat", "--prompt=the", answers={"user\nthe\nmodel\nthought\n": "hi"}
    )
    assert (code, out, len(loop.prompts)) == (0, "hi\n", 1)


def test_thoughts_do_not_reach_stdout(run):
    prompt = "system\n\n\nuser\nthe\nmodel\n"
    answers = {prompt: "<|channel>thought\nhm<channel|>so"}
    for extra in ([], ["--stream"]):
        code, out, err, _ = run("--chat", "--thinking", "--prompt=the", *extra, answers=answers)
        assert (code, out) == (0, "so\n")
        assert ("hm" in err) == bool(extra)


def test_conversation_keeps_its_history(run):
    first = "user\nthe\nmodel\nthought\n"
    second = "user\nthe\nmodel\nhi\nuser\nxa\nmodel\nthought\n"
    answers = {first: "hi", second: "in"}
    code, out, _, loop = run("--chat", answers=answers, stdin="the\n\nxa\n")
    assert (code, out) == (0, "hi\nin\n")
    assert loop.prompts == [first, second]


# ---- files ----


def test_prompt_file_of_text_has_one_prompt_a_line(run, tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_bytes("\ufeffa\r\n\n  \n b\n".encode())
    code, out, _, loop = run(
        "--prompt=c", f"--prompt_file={path}", answers={"a": "1", " b": "2", "c": "0"}
    )
    assert (code, out) == (0, "0\n\n1\n\n2\n")
    assert loop.prompts == ["c", "a", " b"]


def test_jsonl_prompts_and_records(run, tmp_path):
    path, output = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
    path.write_text(
        '{"prompt": "a", "id": "first", "max_tokens": 2, "temperature": 0, "seed": 5}\n'
        "\n"
        '{"messages": [{"role": "user", "content": "日"}], "n": 2, "logprobs": 1}\n'
    )
    answers = {"a": "xyz", "user\n日\nmodel\nthought\n": "t"}
    code, out, _, loop = run(f"--prompt_file={path}", f"--output={output}", answers=answers)
    assert (code, out) == (0, "")
    first, *samples = sorted(records_of(output), key=lambda r: (r["index"], r["sample"]))
    ids = loop.tokenizer.encode("xy")
    assert first.pop("seconds").keys() == {"queue", "prefill", "decode"}
    assert first == {
        "index": 0,
        "sample": 0,
        "id": "first",
        "prompt": "a",
        "text": "xy",
        "finish_reason": "length",
        "seed": 5,
        "num_prompt_tokens": 2,
        "ids": ids[1:],
    }
    assert [(r["index"], r["sample"], r["text"]) for r in samples] == [(1, 0, "t"), (1, 1, "t")]
    assert samples[0]["messages"] == [{"role": "user", "content": "日"}]
    t_id = loop.tokenizer.encode("t")[1]
    assert samples[0]["logprobs"][0] == {"logprob": -0.5, "top": [[t_id, -0.5], [0, None]]}
    # Each line's parameters lie over the checkpoint's and the configured ones.
    assert [r.params.top_k for r in loop.requests] == [64, 64]
    assert [r.params.temperature for r in loop.requests] == [0, 0.9]


def test_text_output_file_holds_what_stdout_would(run, tmp_path):
    output = tmp_path / "out.txt"
    arguments, answers = ["--prompt=a", "--prompt=b"], {"a": "日本", "b": "x"}
    _, expected, _, _ = run(*arguments, answers=answers)
    code, out, _, _ = run(*arguments, f"--output={output}", answers=answers)
    assert (code, out, output.read_text(encoding="utf-8")) == (0, "", expected)
    other = tmp_path / "streamed.txt"
    _, out, _, _ = run(*arguments, f"--output={other}", "--stream", answers=answers)
    assert out == expected
    assert other.read_text(encoding="utf-8") == expected


def test_a_file_that_holds_something_is_never_overwritten(run, tmp_path):
    output = tmp_path / "precious.txt"
    output.write_text("precious\n")
    code, out, err, loop = run("--prompt=a", f"--output={output}", answers={"a": "x"})
    assert (code, out, loop.prompts) == (2, "", [])
    assert err.startswith("error: --output: ")
    assert output.read_text() == "precious\n"


def test_a_refusal_leaves_no_output_file_behind(run, tmp_path):
    output = tmp_path / "out.txt"
    code, _, _, _ = run("--prompt", "the " * 60, f"--output={output}", answers={})
    assert code == 2
    assert not output.exists()


# ---- Ctrl-C ----


def test_interrupt_keeps_finished_and_partial_results(run, tmp_path):
    output = tmp_path / "out.jsonl"
    answers = {"a": "x", "b": "x y z x y z", "c": "never"}
    arguments = [f"--prompt={prompt}" for prompt in answers]
    # Step 2 ends "a"; in step 3 "c" takes its place; step 4 is interrupted.
    code, out, err, loop = run(*arguments, f"--output={output}", answers=answers, interrupt_at=4)
    assert (code, out) == (130, "")
    assert err.rstrip().endswith("interrupted")
    found = {r["prompt"]: (r["text"], r["finish_reason"]) for r in records_of(output)}
    assert found == {"a": ("x", "stop"), "b": ("x y", "cancelled"), "c": ("n", "cancelled")}
    assert loop.is_idle

    code, out, _, _ = run(*arguments, answers=answers, interrupt_at=4)
    assert (code, out) == (130, "x\n\nx y\n\nn\n")
    code, out, _, _ = run("--prompt=b", "--stream", answers=answers, interrupt_at=4)
    assert (code, out) == (130, "x y")


def test_results_behind_an_interrupted_prompt_are_not_lost(run):
    answers = {"a": "x y z x y z", "b": "x"}
    code, out, _, _ = run("--prompt=a", "--prompt=b", answers=answers, interrupt_at=3)
    assert (code, out) == (130, "x \n\nx\n")


# ---- refusals ----


def refused(run, *arguments, **kwargs) -> str:
    code, out, err, loop = run(*arguments, **kwargs)
    assert (code, out) == (2, "")
    *_, last = err.splitlines()
    assert last.startswith("error: ")
    assert loop.num_steps == 0  # nothing was generated before the refusal
    return last


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        ([], ["nothing to do", "--prompt"]),
        (["--promt=x"], ["'promt'", "Did you mean: prompt"]),
        (["--prompt"], ["Missing value", "--prompt"]),
        (["--chat=perhaps"], ["--chat=perhaps"]),
        (["hello"], ["'hello'", "--prompt="]),
        (["--prompt=a", "--config=absent.yaml"], ["absent.yaml", "cannot be read"]),
        (["--prompt=a", "--set=sampling.temprature=1"], ["did you mean sampling.temperature?"]),
        (["--prompt=a", "--set=sampling.temperature=nan"], ["sampling.temperature: 'nan'"]),
        (["--prompt=a", "--set=sampling.max_tokens=-1"], ["sampling.max_tokens: '-1'"]),
        (["--prompt=a", "--set=sampling.max_tokens"], ["not key=value"]),
        (["--prompt=a", "--model=random:99b"], ["random:99b", "31b"]),
        (["--prompt_file=absent.txt"], ["absent.txt", "cannot be read"]),
        (["--prompt=a", "--thinking"], ["--thinking", "--chat"]),
        (["--prompt=a", "--output=x.csv"], ["x.csv", ".txt or .jsonl"]),
        (["--prompt=a", "--output=absent/x.txt"], ["absent/x.txt", "cannot be written"]),
        (["--prompt=a", "--stream", "--set=sampling.n=2"], ["sampling.n", "2 samples"]),
        (
            ["--prompt=a", "--prompt=" + "xyz " * 20],
            ["--prompt 2: prompt: 81 tokens leave no room"],
        ),
    ],
)
def test_bad_input_is_one_clear_line_and_exit_code_2(run, arguments, parts):
    message = refused(run, *arguments, answers={"a": "b"})
    for part in parts:
        assert part in message


@pytest.mark.parametrize(
    ("line", "part"),
    [
        ("{", "not valid JSON"),
        ("[1]", 'either "prompt" or "messages"'),
        ("{}", 'either "prompt" or "messages"'),
        ('{"prompt": "a", "messages": []}', 'either "prompt" or "messages"'),
        ('{"prompt": 5}', "prompt: 5 is not text"),
        ('{"prompt": "a", "prompt": "b"}', "'prompt' is given twice"),
        ('{"prompt": "a", "tools": []}', "tools"),
        (
            '{"prompt": "a", "temprature": 1}',
            "temprature: 1: unknown key; did you mean temperature",
        ),
        ('{"prompt": "a", "temperature": NaN}', "sampling.temperature: nan is not possible"),
        ('{"prompt": "a", "top_k": true}', "sampling.top_k: True is not a whole number"),
        ('{"messages": []}', "the list is empty"),
        ('{"messages": [{"role": "wizard", "content": "x"}]}', "wizard"),
    ],
)
def test_bad_lines_of_a_prompt_file_are_named(run, tmp_path, line, part):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "a"}\n' + line + "\n")
    message = refused(run, f"--prompt_file={path}", answers={"a": "b"})
    assert message.startswith(f"error: {path}:2: ")
    assert part in message


def test_prompt_files_without_prompts_are_refused(run, tmp_path):
    path = tmp_path / "empty.txt"
    path.write_text("\n \n")
    assert "has no prompt" in refused(run, f"--prompt_file={path}")
    path.write_bytes(b"\xff")
    assert "not UTF-8" in refused(run, f"--prompt_file={path}")


def test_refused_settings_leave_the_output_file_alone(run, tmp_path):
    output = tmp_path / "out.txt"
    output.write_text("precious")
    refused(run, "--prompt=a", f"--output={output}", "--set=sampling.top_p=2")
    assert output.read_text() == "precious"


def test_empty_prompts_and_no_tokens_are_served(run):
    assert run("--prompt=", answers={"": "x"})[:2] == (0, "x\n")
    code, out, _, loop = run("--prompt=a", "--set=sampling.max_tokens=0", answers={"a": "x"})
    assert (code, out, loop.requests[0].result().finish_reason) == (0, "\n", "length")


# ---- settings ----


def test_model_is_a_shorthand_below_set(run):
    assert "model=some/folder" in run("--prompt=a", "--model=some/folder", answers={"a": "x"})[2]
    code, _, err, _ = run(
        "--prompt=a", "--model=one", "--set=model=two", "--set=sampling.seed=3", answers={"a": "x"}
    )
    assert code == 0
    assert "model=two" in err
    assert "sampling.seed=3" in err


def test_print_config_prints_effective_settings_and_stops(run, monkeypatch, tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("sampling:\n  top_k: 0\n")

    def locate(settings):
        published = {"top_k": 64, "top_p": 0.95}
        return None, None, settings.with_generation_config(published, "g.json")

    monkeypatch.setattr(api, "locate", locate)
    code, out, _, loop = run(f"--config={path}", "--set=sampling.seed=0", "--print_config")
    assert (code, loop.requests) == (0, [])
    lines = {line.split(":")[0]: line.split(": ", 1)[1].split() for line in out.splitlines()}
    assert lines["sampling.top_k"] == ["0", "#", f"{path}:2"]
    assert lines["sampling.top_p"] == ["0.95", "#", "g.json"]
    assert lines["sampling.seed"] == ["0", "#", "--set"]
    assert lines["sampling.max_tokens"] == ["256", "#", "built-in"]
    again = tmp_path / "again.yaml"
    again.write_text(out)
    assert read_settings(again).build().sampling.top_p == 0.95


def test_help_names_every_flag(run):
    code, out, _, _ = run("--help")
    assert code == 0
    for flag in ("config", "set", "prompt", "prompt_file", "chat", "thinking", "stream", "output"):
        assert f"--{flag}:" in out.replace("--[no]", "--")


# ---- the real thing, in a process of its own ----


def command(*arguments, **kwargs) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-m", "carat_jax.generate", *arguments],
        cwd=ROOT,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **kwargs,
    )


def test_refusals_in_a_process_come_before_jax_is_loaded():
    started = time.monotonic()
    process = command("--config=configs/tiny.yaml", "--prompts=a")
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (2, "")
    assert err.startswith("error: Unknown command line flag 'prompts'. Did you mean: prompt")
    assert len(err.splitlines()) == 1
    assert time.monotonic() - started < 30


@pytest.mark.skipif(not TINY.exists(), reason="the embedded model is not there")
def test_the_embedded_model_writes_from_the_command_line():
    arguments = ["--config=configs/tiny.yaml", "--prompt=Once upon a time"]
    process = command(*arguments, "--set=sampling.max_tokens=12")
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    expected = carat_jax.load("tiny", dtype="float32").generate(
        "Once upon a time", temperature=0, max_tokens=12
    )
    assert out.rstrip("\n") == expected.text.rstrip("\n")
    assert "1 prompt, " in err


@pytest.mark.skipif(not TINY.exists(), reason="the embedded model is not there")
def test_a_real_interrupt_leaves_finished_records(tmp_path):
    prompts, output = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
    prompts.write_text(
        '{"prompt": "The fox", "max_tokens": 3}\n'
        '{"prompt": "Anna", "max_tokens": 3500, "ignore_eos": true}\n'
    )
    process = command(
        "--config=configs/tiny.yaml", f"--prompt_file={prompts}", f"--output={output}"
    )
    deadline = time.monotonic() + 240
    while not (output.exists() and output.read_text()) and time.monotonic() < deadline:
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (130, "")
    assert "Traceback" not in err
    first, second = records_of(output)
    assert (first["prompt"], len(first["ids"]), first["finish_reason"]) == ("The fox", 3, "length")
    assert (second["prompt"], second["finish_reason"]) == ("Anna", "cancelled")
    assert 0 < len(second["ids"]) < 3500
