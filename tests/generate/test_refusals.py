"""What the command refuses: one clear line, exit code 2, nothing generated, nothing overwritten."""

import pytest


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
