"""The command in this process, on a scripted loop."""

import io
import sys

import pytest

import carat_jax
from carat_jax import generate
from carat_jax.engine.tokenizer import Tokenizer
from tests.engine.gemma_like import write_folder
from tests.generate.scripted_loop import ScriptedEngine, ScriptedLoop


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
