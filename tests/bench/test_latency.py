"""The latency benchmark's arithmetic: what a step costs at least, and the steady part of a run."""

import json
import math
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import carat_jax
from carat_jax.assistant_families import ASSISTANTS
from carat_jax.bench import command, cost, device_steps, latency, latency_report
from carat_jax.bench.cost import Cost
from carat_jax.bench.replay import EngineStep, Served
from carat_jax.bench.workload import TraceRequest
from carat_jax.config import read_settings
from carat_jax.decoding.drafters import AssistantDrafter, NgramDrafter
from carat_jax.families import FAMILIES
from carat_jax.model.assistant import Assistant
from carat_jax.model.gemma4 import Gemma4
from carat_jax.model.params import ParamSpec, split
from carat_jax.numerics.attention import PLAIN


def leaves(module):
    """The module's parameters without their arrays."""

    def leaf(spec):
        size = math.prod(spec.shape)
        nbytes = size * jnp.dtype(spec.dtype).itemsize
        return SimpleNamespace(size=size, nbytes=nbytes, ndim=len(spec.shape))

    graph, specs = split(module)
    return graph, jax.tree.map(leaf, specs, is_leaf=lambda spec: isinstance(spec, ParamSpec))


@pytest.fixture(scope="module")
def big():
    """An engine of the 31B without arrays."""
    model, dtype = FAMILIES["31b"], jnp.bfloat16
    _, target = leaves(Gemma4(model, dtype))
    graph, draft = leaves(Assistant(ASSISTANTS["31b"], model, dtype))
    drafter = AssistantDrafter(graph, 3, PLAIN)
    loop = SimpleNamespace(_params={"target": target, "draft": draft}, drafter=drafter)
    return SimpleNamespace(model=model, config=read_settings().build(), loop=loop)


def test_a_decode_step_of_the_31b_reads_61_gb_of_weights_and_the_visible_keys(big):
    costs = cost.pass_costs(big, context=6004, rows=1)
    # 60 layers: 50 local ones with 16 KV heads of 256, 10 global ones with 4 of 512.
    assert costs["local", "attend"].bytes == 50 * 16 * 1024 * 2 * 256 * 2
    assert costs["global", "attend"].bytes == 10 * 4 * 6005 * 2 * 512 * 2
    assert costs["global", "attend"].flops == 10 * 4 * 32 * 512 * 6005
    assert costs["head", "rest"].bytes == 262_144 * 5376 * 2
    weights = cost.total({k: c for k, c in costs.items() if k[1] != "attend"})
    assert weights.bytes == pytest.approx(61.4e9, rel=2e-3)
    matrices = cost.total({k: c for k, c in costs.items() if k[1] not in ("attend", "norm")})
    assert weights.flops == pytest.approx(matrices.bytes, rel=1e-6)  # 2 bytes, 2 operations


def test_the_passes_grow_with_rows_slots_and_layout(big):
    one, four = (cost.pass_costs(big, 6000, rows) for rows in (1, 4))
    assert four["local", "attend"].bytes == one["local", "attend"].bytes * 1027 / 1024
    assert four["local", "attend"].flops == 4 * one["local", "attend"].flops
    # Row i sees 6,001 + i keys.
    rate = one["global", "attend"].flops / 6001
    assert four["global", "attend"].flops == rate * (6001 + 6002 + 6003 + 6004)
    assert four["local", "qkv"] == Cost(one["local", "qkv"].bytes, 4 * one["local", "qkv"].flops)
    eight = cost.pass_costs(big, 6000, 1, slots=8)
    assert eight["global", "attend"] == one["global", "attend"] * 8
    assert eight["head", "rest"].bytes == one["head", "rest"].bytes
    prefill = cost.pass_costs(big, 0, 2000, logit_rows=1)
    assert prefill["head", "rest"] == one["head", "rest"]
    assert prefill["local", "attend"].flops == 50 * 4 * 32 * 256 * (
        1024 * 1025 // 2 + (2000 - 1024) * 1024
    )
    big.config = read_settings(keywords={"cache.global_layers": "v_rot"}).build()
    rotated = cost.pass_costs(big, 6000, 1)
    assert rotated["global", "attend"].bytes == one["global", "attend"].bytes * 640 / 1024
    assert rotated["local", "attend"] == one["local", "attend"]
    big.config = read_settings().build()


def test_a_burst_reads_the_assistant_once_a_draft(big, monkeypatch):
    facts = SimpleNamespace(config=ASSISTANTS["31b"])
    monkeypatch.setattr(cost, "merge", lambda graph, params: facts)
    costs = cost.draft_costs(big, 6000)
    assert costs["draft", "head"].bytes == 3 * 262_144 * 1024 * 2
    # Three local layers see W + 1 keys of the last local cache, one all of the last global one.
    local, far = 3 * 16 * 1025 * 2 * 256, 4 * 6001 * 2 * 512
    assert costs["draft", "attend"].bytes == 3 * 2 * (local + far)
    loop = SimpleNamespace(_params={}, drafter=NgramDrafter(3))
    assert cost.draft_costs(SimpleNamespace(loop=loop), 6000) == {}


def test_a_mixture_reads_the_experts_that_its_tokens_take():
    model = FAMILIES["26b-a4b"]
    _, target = leaves(Gemma4(model, jnp.bfloat16))
    loop = SimpleNamespace(_params={"target": target})
    engine = SimpleNamespace(model=model, config=read_settings().build(), loop=loop)
    # 30 layers of 128 experts of 704, 8 a token: gate, up and down of width 2,816, 2 bytes each.
    count = sum(not layer.is_sliding for layer in model.layers)
    expert = 3 * 704 * 2816
    one, four = (cost.pass_costs(engine, 1000, rows)["global", "experts"] for rows in (1, 4))
    assert one.bytes == pytest.approx(count * 8 * expert * 2)
    assert one.flops == pytest.approx(count * 8 * expert * 2)
    assert four.bytes == pytest.approx(count * 128 * (1 - (15 / 16) ** 4) * expert * 2)
    assert four.flops == pytest.approx(4 * one.flops)
    counted = cost.pass_costs(engine, 1000, 4, experts_read=23.5)["global", "experts"]
    assert counted.bytes == pytest.approx(count * 23.5 * expert * 2)
    assert counted.flops == four.flops


def test_a_table_of_inputs_by_layer_is_looked_up_and_not_read():
    model = FAMILIES["e4b"]
    _, target = leaves(Gemma4(model, jnp.bfloat16))
    loop = SimpleNamespace(_params={"target": target})
    engine = SimpleNamespace(model=model, config=read_settings().build(), loop=loop)
    costs = cost.pass_costs(engine, 1000, rows=4, slots=2)
    attend = cost.total({key: c for key, c in costs.items() if key[1] == "attend"})
    weights = sum(leaf.nbytes for leaf in jax.tree.leaves(target))
    # 42 layers of 256 numbers for each of 262,144 ids, of which 8 are wanted.
    table = 262_144 * 42 * 256 * 2
    assert cost.total(costs).bytes - attend.bytes == weights - table + 8 * 42 * 256 * 2
    matrices = cost.total({k: c for k, c in costs.items() if k[1] not in ("attend", "norm")})
    assert matrices.flops == pytest.approx(8 * (weights - table), rel=1e-3)


def test_layers_that_own_no_keys_run_for_one_row_of_a_prompt():
    model = FAMILIES["e2b"]
    _, target = leaves(Gemma4(model, jnp.bfloat16))
    loop = SimpleNamespace(_params={"target": target})
    engine = SimpleNamespace(model=model, config=read_settings().build(), loop=loop)
    prompt = cost.pass_costs(engine, 0, 2000, logit_rows=1)
    # Layers 0 to 14 have an MLP of 6,144, 15 to 34 one of 12,288; every fifth is global.
    down = 1536 * 6144 * (12 * 2000 + 16 * 2) * 2
    assert prompt["local", "down"].flops == down
    # The last row of 4 global layers sees all 2,000 keys; of 3 that own theirs every row does.
    heads, dim = 8, 512
    rows = 3 * 2000 * 2001 // 2 + 4 * 2000
    assert prompt["global", "attend"].flops == 4 * heads * dim * rows


@pytest.mark.parametrize(
    ("setting", "told"),
    [
        ("decode.drafter=ngram", "decode.drafter is not of cache, attention, products, moe"),
        ("engine.max_batch=2", "engine.max_batch is not of"),
        ("products.impl", "'products.impl' is not key=value"),
        ("products.imp=xla", "did you mean products.impl?"),
    ],
)
def test_what_steps_cannot_be_timed_against_is_refused_before_anything_is_loaded(
    setting, told, monkeypatch
):
    monkeypatch.setattr(command, "load_weights", None)
    with pytest.raises(ValueError, match="--against: ") as refused:
        command.call(latency, ["--set=model=tiny", f"--against={setting}"])
    assert told in str(refused.value)


def test_shares_are_of_whichever_limit_binds():
    limits = latency.Limits(bytes_per_s=4e12, flops_per_s=800e12)
    told = limits.shares(Cost(60e9, 80e12), 0.2)
    assert told["gb_per_s"] == pytest.approx(300)
    assert told["tflop_per_s"] == pytest.approx(400)
    assert told["of_limit"] == pytest.approx(0.5)
    assert limits.shares(Cost(60e9, 0), 0.02)["of_limit"] == pytest.approx(0.75)


def test_the_steady_part_is_where_all_streams_run():
    def served(times):
        return Served(TraceRequest(0, 0, 8, len(times), None, 0.0), 0.0, times, "length")

    # Both run from 2.0 to 5.0; the second commits two tokens in two of its rounds.
    streams = [
        served([1.0, 2.0, 3.0, 4.0, 5.0]),
        served([2.0, 3.0, 3.0, 4.0, 4.0, 5.0, 6.0]),
    ]
    steps = [EngineStep(float(t), 0.1 * t) for t in range(1, 7)]
    told = latency.steady(streams, steps, queued_ms=800.0)
    assert told["tpot_ms"] == pytest.approx(3.0 * 2 / 8 * 1e3)
    assert told["output_tokens_per_s"] == pytest.approx(8 / 3)
    assert told["step_ms"] == told["step_ms_p50"] == pytest.approx(1000)
    assert told["step_over_queued"] == pytest.approx(1.25)
    assert told["python_ms"] == pytest.approx(400)
    assert told["python_of_step"] == pytest.approx(0.4)
    apart = [served([1.0, 2.0]), served([3.0, 4.0])]
    with pytest.raises(ValueError, match="--tokens: a stream ends before the last one begins"):
        latency.steady(apart, steps, queued_ms=800.0)


def test_rows_of_other_switches_stand_beside_each_other(tmp_path):
    fixed = {"bench": "latency", "case": "decode", "context": 6000, "batch": 1, "ms": 1.0}
    rows = [
        fixed | {"global_layers": "kv", "uniform_rows": 0},
        fixed | {"global_layers": "kv", "uniform_rows": 4},
        fixed | {"global_layers": "v_rot"},
        fixed | {"global_layers": "kv", "ms": 2.0},
    ]
    path = tmp_path / "latency.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    found = {latency_report.name_of(row): row["ms"] for row in latency_report.read_rows(path)}
    assert found == {"decode": 2.0, "decode, 4 uniform rows": 1.0, "decode, v_rot": 1.0}


def test_experts_read_are_a_column_where_there_are_any():
    fixed = {"bench": "latency", "case": "decode", "context": 6000, "batch": 1, "ms": 2.0}
    fixed |= {"global_layers": "kv", "least_gb": 8.0, "gb_per_s": 4000.0, "of_limit": 0.9}
    dense, mixture = fixed, fixed | {"case": "verify_4", "experts_read": 23.46}
    head, _, first, second = latency_report.tables([dense, mixture]).splitlines()
    assert head.endswith("| of limit | experts read |")
    assert first.endswith("| 90% |  |")
    assert second.endswith("| 90% | 23.5 |")
    assert "experts" not in latency_report.tables([dense])


def test_rows_of_another_model_are_not_mixed_in(tmp_path, monkeypatch):
    monkeypatch.setattr(command, "_load", None)
    (tmp_path / "latency.jsonl").write_text('{"model": "random:31b"}\n')
    with pytest.raises(ValueError, match="rows of random:31b; give tiny a folder of its own"):
        command.call(latency, ["--set=model=tiny", f"--output={tmp_path}"])


def test_a_call_of_several_rounds_is_timed_by_the_round():
    engine = carat_jax.load("tiny", engine={"max_context": 128}, decode={"rounds_per_call": 4})
    step = device_steps.whole_round(device_steps.filled(engine, 20))
    step.compile()
    before, started = np.asarray(step.loop._state.bank.lengths), time.perf_counter()
    told = step.queue(2)
    np.testing.assert_array_equal(step.loop._state.bank.lengths, before + 8)
    assert 0 < 8 * told <= time.perf_counter() - started


def test_a_round_of_uniform_rows_is_called_whole():
    sizes = {"max_batch": 2, "max_context": 128}
    engine = carat_jax.load("tiny", engine=sizes, decode={"uniform_rows": 2})
    step = device_steps.whole_round(device_steps.filled(engine, 20))
    step.compile()
    before = np.asarray(step.loop._state.bank.lengths)
    step.queue(3)
    np.testing.assert_array_equal(step.loop._state.bank.lengths, before + 3)
    assert step.temp_bytes > 0


def test_the_program_runs_on_tiny(tmp_path):
    command = [
        *(sys.executable, "-m", "carat_jax.bench.latency", "--config", "configs/tiny.yaml"),
        *("--set", "engine.prefill_chunks=[64]", "--context", "100", "--batches", "2"),
        *("--drafter", "none", "--steps", "2", "--tokens", "10", "--output", str(tmp_path)),
    ]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    rows = {row["case"]: row for row in latency_report.read_rows(tmp_path / "latency.jsonl")}
    assert list(rows) == ["decode", "verify_1", "engine_decode"]
    streams = rows["engine_decode"]
    assert (streams["lost"], streams["compilations"], streams["requests"]) == (0, 0, 2)
    assert streams["step_over_queued"] == pytest.approx(
        streams["step_ms"] / rows["decode"]["ms"], rel=1e-3
    )
    text = (tmp_path / "latency.md").read_text()
    assert f"| 100 | 2 | decode | {rows['decode']['ms']:.2f} |" in text
    assert (tmp_path / "latency-light.png").stat().st_size > 10_000
    assert all(json.loads(line)["commit"] for line in (tmp_path / "latency.jsonl").open())
