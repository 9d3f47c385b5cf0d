"""Kernels of a trace find their layer and part, whatever the compiler did to the metadata."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from carat_jax.bench import kernel_trace
from carat_jax.bench.kernel_trace import Kernel

# Every sixth layer is global.
MODEL = SimpleNamespace(layer=lambda i: SimpleNamespace(is_sliding=(i + 1) % 6 != 0))

HLO = """
HloModule jit_step, is_scheduled=true

%fused_inner (p: bf16[4]) -> bf16[4] {
  %p = bf16[4]{0} parameter(0)
  ROOT %m = bf16[4]{0} multiply(%p, %p), metadata={op_name="jit(step)/layer_1/norm/mul"}
}

%fused_gemm (p.1: bf16[4], q.1: bf16[4,4]) -> bf16[4] {
  %p.1 = bf16[4]{0} parameter(0)
  %q.1 = bf16[4,4]{1,0} parameter(1)
  %dot.3 = bf16[4]{0} dot(%p.1, %q.1), metadata={op_name="jit(step)/layer_0/o/dot_general"}
  ROOT %t.1 = bf16[4]{0} tanh(%dot.3), metadata={op_name="jit(step)/layer_0/norm/tanh"}
}

%fused_norm (p.3: bf16[4], q.3: bf16[4,4]) -> bf16[4] {
  %p.3 = bf16[4]{0} parameter(0)
  %q.3 = bf16[4,4]{1,0} parameter(1)
  %m.3 = bf16[4]{0} multiply(%p.3, %p.3), metadata={op_name="jit(step)/layer_1/norm/mul"}
  ROOT %dot.7 = bf16[4]{0} dot(%q.3, %m.3)
}

%fused_head (p.2: bf16[4], q.2: bf16[8,4], r.2: f32[8]) -> f32[8] {
  %p.2 = bf16[4]{0} parameter(0)
  %q.2 = bf16[8,4]{1,0} parameter(1)
  %r.2 = f32[8]{0} parameter(2)
  %wide.2 = f32[8,4]{1,0} convert(%q.2), metadata={op_name="jit(step)/head/dot_general"}
  %dot.6 = f32[8]{0} dot(%wide.2, %p.2), metadata={scheduling_name="dot.6"}
  ROOT %t.2 = f32[8]{0} add(%dot.6, %r.2), metadata={op_name="jit(step)/accept/add"}
}

ENTRY %main (w: bf16[4,4], x: bf16[4]) -> bf16[4] {
  %w = bf16[4,4]{1,0} parameter(0), metadata={op_name="params['target']['layers'][1]['mlp']['down_proj']"}
  %d = bf16[4,4]{1,0} parameter(1), metadata={op_name="params['draft']['layers'][0]['self_attn']['o_proj']"}
  %x = bf16[4]{0} parameter(2), metadata={op_name="x"}
  %e = bf16[8,4]{1,0} parameter(3), metadata={op_name="params['draft']['embed_tokens']"}
  %v = bf16[8,4]{1,0} parameter(4), metadata={op_name="params['target']['embed_tokens']"}
  %dot.4 = bf16[8]{0} dot(%x, %e), lhs_contracting_dims={0}
  %dot.5 = bf16[8]{0} dot(%x, %v), lhs_contracting_dims={0}
  %wide = f32[4,4]{1,0} convert(%w)
  %dot.1 = bf16[4]{0} dot(%x, %wide), lhs_contracting_dims={0}
  %dot.2 = bf16[4]{0} custom-call(%x, %d), custom_call_target="__cublas$gemm"
  %fusion.1 = bf16[4]{0} fusion(%dot.1), kind=kLoop, calls=%fused_inner
  %copy.1 = bf16[4]{0} copy(%fusion.1)
  %gemm.1 = bf16[4]{0} fusion(%copy.1, %x), calls=%fused_gemm, metadata={op_name="jit(step)/layer_0/norm/tanh"}
  %gemm.2 = f32[8]{0} fusion(%copy.1, %v, %x), calls=%fused_head, metadata={op_name="jit(step)/accept/add"}
  %gemm.3 = bf16[4]{0} fusion(%copy.1, %w), calls=%fused_norm
  %loop.1 = bf16[4]{0} while(%copy.1), condition=%c, body=%b
  ROOT %add.1 = bf16[4]{0} add(%copy.1, %x), metadata={op_name="jit(step)/layer_0/attend/add" source_line=3}
}
"""  # noqa: E501


INNER = {"m", "dot.3", "t.1", "wide.2", "t.2", "dot.6", "m.3", "dot.7"}


def test_every_instruction_has_the_scope_of_its_source_or_of_what_is_next_to_it():
    program = kernel_trace.read_program(HLO)
    assert program.callers == {"loop.1"}
    assert {name: program.scopes[name] for name in program.scopes.keys() - INNER} == {
        "wide": "layer_1/down",
        "dot.1": "layer_1/down",
        "dot.2": "draft/assistant_0/o",
        "dot.4": "draft/head",
        "dot.5": "head",
        "fusion.1": "jit(step)/layer_1/norm/mul",
        "copy.1": "jit(step)/layer_0/o/dot_general",
        "gemm.1": "jit(step)/layer_0/o/dot_general",
        "gemm.2": "head",
        "gemm.3": "layer_1/down",
        "loop.1": "jit(step)/layer_0/o/dot_general",
        "add.1": "jit(step)/layer_0/attend/add",
    }


def test_kernels_are_added_up_by_instruction_over_steps():
    program = kernel_trace.read_program(HLO)
    events = [
        ("gemm", "dot.1", "", 5.0),
        ("gemm", "dot.1", "", 7.0),
        ("add_1", "", "", 3.0),  # named as its instruction, with no word of it
        ("add_1", "loop.1::add.1", "", 1.0),
        ("memcpy", "", "", 2.0),
        ("while", "loop.1", "", 100.0),  # spans what it calls
    ]
    attend = "jit(step)/layer_0/attend/add"
    assert kernel_trace.kernels_of(events, 2, program) == [
        Kernel("gemm", "dot.1", "layer_1/down", 1.0, 6.0),
        Kernel("add_1", "add.1", attend, 1.0, 2.0),
        Kernel("memcpy", "", "", 0.5, 1.0),
    ]


@pytest.mark.parametrize(
    ("scope", "expected"),
    [
        ("jit(f)/layer_0/qkv/norm/mul", ("local", "norm")),
        ("jit(f)/layer_5/qkv/dot_general", ("global", "qkv")),
        ("jit(f)/layer_5/mlp/gate_up/gelu/tanh", ("global", "gelu")),
        ("jit(f)/layer_5/add", ("global", "rest")),
        ("jit(f)/draft/assistant_0/mlp/down/dot_general", ("draft", "down")),
        ("jit(f)/draft/head/dot_general", ("draft", "head")),
        ("jit(f)/head/dot_general", ("head", "rest")),
        ("jit(f)/accept/argmax", ("accept", "rest")),
        ("jit(f)/norm/mul", ("rest", "norm")),
        ("", ("rest", "rest")),
    ],
)
def test_a_scope_tells_layer_kind_and_part(scope, expected):
    assert kernel_trace.place(scope, MODEL) == expected


def test_groups_add_up_to_the_kernels():
    kernels = [
        Kernel("a", "a", "layer_0/norm", 2.0, 3.0),
        Kernel("b", "b", "layer_0/norm", 1.0, 4.0),
        Kernel("c", "c", "head", 1.0, 9.0),
    ]
    assert kernel_trace.grouped(kernels, MODEL) == {
        ("head", "rest"): (1.0, 9.0),
        ("local", "norm"): (3.0, 7.0),
    }


def test_kernels_of_all_layers_of_a_kind_are_added_up():
    kernels = [
        Kernel("gemm_fusion_dot_2", "gemm_fusion_dot.2", "jit(f)/layer_0/o", 1.0, 3.0),
        Kernel("gemm_fusion_dot_31", "gemm_fusion_dot.31", "jit(f)/layer_6/o", 1.0, 4.0),
        Kernel("gemm_fusion_dot_2", "gemm_fusion_dot.4", "jit(f)/layer_5/o", 1.0, 5.0),
        Kernel("carat_append_ring", "custom-call.7", "jit(f)/draft/assistant_0/o", 2.0, 9.0),
    ]
    assert kernel_trace.over_layers(kernels, MODEL) == [
        Kernel("carat_append_ring", "", "jit(f)/draft/assistant_0/o", 2.0, 9.0),
        Kernel("gemm_fusion_dot", "", "jit(f)/local/o", 2.0, 7.0),
        Kernel("gemm_fusion_dot", "", "jit(f)/global/o", 1.0, 5.0),
    ]


def test_gpu_events_are_those_of_the_streams_of_the_first_device():
    def event(name, **stats):
        return SimpleNamespace(name=name, stats=stats.items(), duration_ns=2000.0)

    def plane(name, **lines):
        made = [SimpleNamespace(name=line, events=events) for line, events in lines.items()]
        return SimpleNamespace(name=name, lines=made)

    host = plane("/host:CPU", python=[event("call", hlo_op="fusion.9")])
    streams = {"Stream #13(Compute)": [event("k", hlo_op="fusion.1"), event("Memcpy")]}
    first = plane("/device:GPU:0", **streams, **{"XLA Ops": [event("fusion.1")]})
    second = plane("/device:GPU:1", **streams)
    assert list(kernel_trace.device_events([second, host, first])) == [
        ("k", "fusion.1", "", 2.0),
        ("Memcpy", "", "", 2.0),
    ]
    assert list(kernel_trace.device_events([host])) == [("call", "fusion.9", "", 2.0)]


def test_a_recorded_step_shows_its_scopes():
    @jax.jit
    def step(x):
        with jax.named_scope("layer_0"), jax.named_scope("down"):
            x = jnp.tanh(x @ x)
        with jax.named_scope("head"):
            return jnp.sort(x, axis=0)

    x = jnp.ones((64, 64))
    compiled = step.lower(x).compile()

    def run():
        for _ in range(3):
            jax.block_until_ready(compiled(x))

    run()
    kernels = kernel_trace.record(run, 3, compiled.as_text())
    scopes = {part for kernel in kernels for part in kernel.scope.split("/")}
    assert {"down", "head"} <= scopes
    assert all(kernel.count == int(kernel.count) and kernel.us > 0 for kernel in kernels)
