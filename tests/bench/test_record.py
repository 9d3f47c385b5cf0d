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
    engine = types.SimpleNamespace(variant=lambda **given: given)
    monkeypatch.setattr(carat_jax, "load", lambda settings: loads.append(settings) or engine)
    command._load.cache_clear()
    monkeypatch.setattr(
        record,
        "RUNS",
        {
            "one": (benchmark("one", told), ("--set=cache.global_layers=v_rot",)),
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


def test_runs_share_weights_whatever_else_they_set(runs, tmp_path, capsys):
    told, loads = runs
    given = ["--set=model=tiny", f"--output={tmp_path}", "--runs=bad,two,one,two"]
    assert run(*given) == 1
    both = ["model=tiny", "cache.global_layers=v_rot"]
    assert [t[:3] for t in told] == [
        ("bad", f"{tmp_path}/bad", ["model=tiny"]),
        ("two", f"{tmp_path}/two", ["model=tiny"]),
        ("one", f"{tmp_path}/one", both),
        ("two", f"{tmp_path}/two", ["model=tiny"]),
    ]
    small = {"engine.max_batch": 1, "engine.max_context": 256}
    switched = {"cache.global_layers": "v_rot", **small}
    assert [t[3] for t in told] == [small, small, switched, small]
    assert len(loads) == 1, "weights are read once"
    assert "error: failed: bad" in capsys.readouterr().err


def test_other_weights_are_loaded_anew(runs, tmp_path):
    _, loads = runs
    for model in ("tiny", "random:31b/6"):
        assert run(f"--set=model={model}", f"--output={tmp_path}", "--runs=two") == 0
    assert [settings.build().model for settings in loads] == ["tiny", "random:31b/6"]


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
