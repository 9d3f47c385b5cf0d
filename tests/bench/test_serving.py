"""The serving benchmark: its trace, its arithmetic, its ladder, and that nothing is lost."""

import itertools
import math
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

from carat_jax.bench import drawing, serving, serving_report, workload
from carat_jax.bench.replay import Replay, Served, progress_of, summary
from carat_jax.bench.workload import TraceRequest
from carat_jax.config import read_settings
from tests.engine.toy_engine import make_engine, prompt
from tools.make_trace import make_trace


def trace_request(i, prompt_len, output_len, extends=None, arrival=0.0):
    return TraceRequest(i, 100 + i, prompt_len, output_len, extends, arrival)


# ---- the trace -------------------------------------------------------------------------------


def test_the_committed_trace_is_what_its_script_makes(tmp_path):
    workload.write_trace(make_trace(), tmp_path / "trace.jsonl")
    assert (tmp_path / "trace.jsonl").read_bytes() == workload.TRACE.read_bytes()


def test_the_trace_has_the_statistics_it_states():
    trace = workload.read_trace()
    assert len(trace) == 64
    follow_ups = [r for r in trace if r.extends is not None]
    assert [r.id for r in follow_ups] == list(range(3, 64, 4))
    added = [r.prompt_len - trace[r.extends].prompt_len for r in follow_ups]
    assert min(added) >= 200
    assert max(added) <= 600
    fresh = [r.prompt_len for r in trace if r.extends is None]
    assert abs(math.log(statistics.median(fresh) / 2000)) < 0.15
    assert abs(statistics.stdev(map(math.log, fresh)) - 0.8) < 0.1
    outputs = [r.output_len for r in trace]
    assert abs(math.log(statistics.median(outputs) / 200)) < 0.15
    assert all(128 <= r.prompt_len <= 8000 and 32 <= r.output_len <= 512 for r in trace)
    gaps = [b.arrival - a.arrival for a, b in itertools.pairwise(trace)]
    assert min(gaps) >= 0
    assert abs(statistics.mean(gaps) - 1) < 0.2
    assert len({r.seed for r in trace}) == 64


def test_prompts_are_a_function_of_seeds_and_vocabulary():
    trace = [trace_request(0, 5, 4), trace_request(1, 8, 4, extends=0), trace_request(2, 3, 4)]
    first, second, third = workload.prompt_ids(trace, 4096)
    # Written down once: anybody's replay must draw the same.
    assert first == [1450, 2408, 3386, 3184, 3266]
    assert [len(first), len(second), len(third)] == [5, 8, 3]
    assert second[:5] == first
    wide = workload.prompt_ids(trace, 262_144)
    assert all(1_000 <= token < 200_000 for ids in wide for token in ids)
    assert wide != [first, second, third]
    with pytest.raises(ValueError, match="vocabulary of 900"):
        workload.prompt_ids(trace, 900)


def test_a_scaled_trace_keeps_what_extends_what():
    trace = [trace_request(0, 1000, 100), trace_request(1, 1300, 30, extends=0)]
    short = workload.scaled(trace, 0.05)
    assert [(r.prompt_len, r.output_len) for r in short] == [(50, 5), (65, 4)]
    assert workload.context_of(short) == 69


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{}", "trace.jsonl:1: .*missing"),
        ("not json", "trace.jsonl:1: "),
        (
            '{"id": 0, "seed": 1, "prompt_len": 9, "output_len": 4, "extends": 0, "arrival": 0}',
            "trace.jsonl:1: ids count from 0, and extend earlier ones",
        ),
    ],
)
def test_a_broken_trace_is_refused_with_its_line(tmp_path, line, message):
    path = tmp_path / "trace.jsonl"
    path.write_text(line)
    with pytest.raises(ValueError, match=message):
        workload.read_trace(path)
    with pytest.raises(ValueError, match="cannot be read"):
        workload.read_trace(tmp_path / "absent.jsonl")


# ---- the arithmetic --------------------------------------------------------------------------


def test_a_summary_is_made_of_the_times_at_which_tokens_came():
    served = [
        Served(trace_request(0, 10, 3), 0.0, [1.0, 1.5, 2.0], "length"),
        Served(trace_request(1, 20, 2), 0.5, [1.0, 2.5], "length"),
        Served(trace_request(2, 30, 4), 1.0, [4.0], "cancelled"),
    ]
    told = summary(served)
    assert (told["requests"], told["lost"]) == (3, 1)
    assert (told["prompt_tokens"], told["output_tokens"], told["seconds"]) == (60, 6, 4.0)
    assert told["output_tokens_per_s"] == 1.5
    # 0.5 s and 1.5 s a token.
    assert told["tpot_ms_mean"] == told["tpot_ms_p50"] == 1000
    assert told["tpot_ms_p90"] == pytest.approx(1400)
    assert told["tpot_ms_p99"] == pytest.approx(1490)
    assert told["gap_ms_p50"] == pytest.approx(500)
    # 1.0, 0.5 and 3.0 s until the first.
    assert told["first_token_s_p50"] == 1.0
    assert told["first_token_s_p90"] == pytest.approx(2.6)


def test_counters_are_told_as_differences():
    before = {"rounds": 5, "compilations": 7, "slot_rounds": 4, "accepted": [4, 1], "restarts": 0}
    after = {"rounds": 9, "compilations": 7, "slot_rounds": 8, "accepted": [7, 4], "restarts": 1}
    assert progress_of(after, before) == {
        "rounds": 4, "compilations": 0, "restarts": 1, "tokens_per_round": 2.5,
    }  # fmt: skip


def test_the_rows_of_the_ladder_add_one_idea_each():
    rows = [serving.row_settings(row, "assistant") for row in "abcd"]
    assert rows[0] == {
        "cache.local_layers": "paged",
        "cache.global_layers": "kv",
        "attention.verify": "fused",
        "attention.group_heads": False,
        "decode.drafter": "none",
    }
    assert rows[1] == rows[0] | {"cache.local_layers": "ring"}
    assert rows[2] == rows[1] | {"attention.group_heads": True}
    assert rows[3] == rows[2] | {
        "decode.drafter": "assistant",
        "decode.draft_len": 3,
        "decode.simulate_acceptance": 2.5,
    }
    for row in rows:
        read_settings(keywords=row).build()
    with pytest.raises(ValueError, match="no row 'e'; there are a, b, c, d"):
        serving.row_settings("e", "none")


def test_faults_are_named():
    record = {"row": "c", "lost": 2, "compilations": 0, "restarts": 1}
    assert serving.faults(record) == ["row c: 2 lost", "row c: 1 restarts"]


def test_the_table_compares_with_row_a_under_the_same_load():
    def row(name, load, tokens, ms):
        percentiles = {f"tpot_ms_p{q}": ms for q in (50, 90, 99)}
        firsts = {f"first_token_s_p{q}": 0.5 for q in (50, 99)}
        return {
            "mode": "closed", "row": name, "concurrency": load, "output_tokens_per_s": tokens,
            "tokens_per_round": 1.0, "compile_s": 9.6, "lost": 0, **percentiles, **firsts,
        }  # fmt: skip

    text = serving_report.table([row("a", 4, 100.0, 30.0), row("c", 4, 150.0, 20.0)])
    assert text.splitlines()[3] == (
        "| concurrency 4 | c: + grouped heads | 150.0 | 1.50 x | 20.00 | 1.50 x | 20.00 | 20.00 "
        "| 0.500 | 0.500 | 1.00 | 10 | 0 |"
    )
    alone = serving_report.table([row("c", 4, 150.0, 20.0)])
    assert "| 150.0 |  | 20.00 |  |" in alone


def test_lines_that_end_together_are_all_named_in_the_picture():
    rows = [
        {"mode": "closed", "row": name, "concurrency": load, "output_tokens_per_s": rate * load,
         "tpot_ms_p50": rate}
        for name, rate in zip("abcd", (100, 99.5, 99.2, 99), strict=True) for load in (1, 4)
    ]  # fmt: skip
    figure = pytest.importorskip("matplotlib.figure").Figure()
    serving_report.draw(rows)(figure, drawing.LIGHT)
    for axis, lowest in zip(figure.axes, (4 * 99, 99), strict=True):
        names = sorted(axis.texts, key=lambda text: text.xy[1])
        assert [text.get_text() for text in names] == list("dcba")
        places, top = [text.xy[1] for text in names], axis.get_ylim()[1]
        assert places[0] == lowest
        assert min(b - a for a, b in itertools.pairwise(places)) > 0.04 * top
        assert places[-1] < top


# ---- the replay ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def engine():
    return make_engine(max_batch=2, prefill_chunks=[16])


@pytest.mark.parametrize("mode", ["closed", "open"])
def test_a_replay_gives_every_request_its_tokens(engine, mode, monkeypatch):
    trace = [trace_request(i, 6 + i, 3 + i % 3, arrival=i / 4) for i in range(5)]
    prompts = [prompt(r.prompt_len, seed=r.id) for r in trace]
    told = []
    submit = engine.loop.submit

    def counted(*arguments):
        request = submit(*arguments)
        told.append(request)
        most.append(sum(not r.is_finished for r in told))
        return request

    most = []
    monkeypatch.setattr(engine.loop, "submit", counted)
    replay = Replay(engine, trace, prompts)
    served = replay.closed(2) if mode == "closed" else replay.open(1000.0)
    assert [s.request for s in served] == trace
    assert all(s.is_whole for s in served)
    assert [len(s.token_times) for s in served] == [r.output_len for r in trace]
    assert max(most) == (2 if mode == "closed" else 5)
    for result, ids in zip([r.result() for r in told], prompts, strict=True):
        assert (
            result.ids
            == engine.generate(ids, temperature=0, ignore_eos=True, max_tokens=len(result.ids)).ids
        )
    for s in served:
        assert s.token_times == sorted(s.token_times)
        assert s.token_times[0] > s.sent


def test_the_program_runs_on_tiny(tmp_path):
    command = [
        *(sys.executable, "-m", "carat_jax.bench.serving", "--config", "configs/tiny.yaml"),
        *("--set", "engine.prefill_chunks=[64]", "--scale", "0.02", "--requests", "5"),
        *("--rows", "b", "--concurrency", "2", "--output", str(tmp_path)),
    ]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (row,) = serving_report.read_rows(tmp_path / "serving.jsonl")
    expected = workload.scaled(workload.read_trace()[:5], 0.02)
    assert row["output_tokens"] == sum(r.output_len for r in expected)
    assert (row["lost"], row["compilations"], row["requests"]) == (0, 0, 5)
    assert "b: + rings" in (tmp_path / "serving.md").read_text()
    assert (tmp_path / "serving-closed-light.png").stat().st_size > 10_000
