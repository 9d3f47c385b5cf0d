"""The command: what goes to stdout, to files and to stderr, exit codes, Ctrl-C."""

from carat_jax.config import read_settings
from carat_jax.engine import api
from tests.generate.scripted_loop import records_of

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
    assert (code, out) == (0, "hi\n")
    assert loop.prompts == ["user\nthe\nmodel\nthought\n"]


def test_the_last_line_says_what_drafts_were_worth(run):
    _, _, err, _ = run("--prompt=the", answers={"the": "x y z"})
    assert "1 prompt, 6 tokens, 2.25 a pass, in " in err.splitlines()[-1]


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
