"""A record: every run with its own settings, on one load of the weights, whatever the others do."""

import types

import pytest

import carat_jax
from carat_jax.bench import command, record


def benchmark(name, told, fails=False):
    """A module that notes what it was given, and loads the weights as benchmarks do."""
    known = command.new_flags("Folder.")

    def main():
        told.append((name, known.output, list(known.set), command.load_weights(known)))
        if fails:
            raise RuntimeError("no room")
        return 0

    return types.SimpleNamespace(__name__=name, _FLAGS=known, main=main)


@pytest.fixture
def runs(monkeypatch):
    told, loads = [], []
    monkeypatch.setattr(carat_jax, "load", lambda settings: loads.append(settings) or "engine")
    command._load.cache_clear()
    monkeypatch.setattr(
        record,
        "RUNS",
        {
            "one": (benchmark("one", told), ("--set=engine.max_batch=2",)),
            "bad": (benchmark("bad", told, fails=True), ()),
            "two": (benchmark("two", told), ()),
        },
    )
    yield told, loads
    command._load.cache_clear()


def run(*arguments):
    record._FLAGS.unparse_flags()
    record._FLAGS(["record", *arguments])
    return record.main()


def test_runs_share_weights_where_their_settings_agree(runs, tmp_path, capsys):
    told, loads = runs
    given = ["--set=model=tiny", f"--output={tmp_path}", "--runs=bad,two,one,two"]
    assert run(*given) == 1
    both = ["model=tiny", "engine.max_batch=2"]
    assert [t[:3] for t in told] == [
        ("bad", f"{tmp_path}/bad", ["model=tiny"]),
        ("two", f"{tmp_path}/two", ["model=tiny"]),
        ("one", f"{tmp_path}/one", both),
        ("two", f"{tmp_path}/two", ["model=tiny"]),
    ]
    assert len(loads) == 3, "the settings that are shared, others, and the first again"
    assert "error: failed: bad" in capsys.readouterr().err


def test_an_unknown_run_is_refused_by_name(runs):
    with pytest.raises(ValueError, match="--runs: no run 'ladder'; there are one, bad, two"):
        run("--output=x", "--runs=ladder")
    with pytest.raises(ValueError, match="--runs: give one or more of one, bad, two"):
        run("--output=x", "--runs=")
    with pytest.raises(ValueError, match="give --output DIR"):
        run("--runs=one")


def test_wrong_settings_are_said_once_and_before_any_run(runs, monkeypatch):
    told, _ = runs

    def refuse(settings):
        raise ValueError("no such model")

    monkeypatch.setattr(carat_jax, "load", refuse)
    with pytest.raises(ValueError, match="no such model"):
        run("--output=x", "--runs=one,two")
    assert told == []
