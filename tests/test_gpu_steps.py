"""Whole steps lower for a GPU on a machine without one: no shape that settings allow is refused."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from carat_jax import plan
from carat_jax.decoding.steps import SamplerKind, build_steps
from carat_jax.engine.memory import new_state
from carat_jax.engine.shapes import step_options
from tests.kernels.lowering import device_of_name

SETTINGS = ["dtype=bfloat16", "engine.max_batch=2", "engine.max_context=1024"]
ASSISTANT = ["decode.drafter=assistant", "decode.draft_len=3"]


def made(settings):
    """The steps of an engine on a GPU, and the shapes of its parameters and its state."""
    graph, blueprint = plan.blueprint([*settings, *SETTINGS], None, "gpu")
    config, drafting = blueprint.config, blueprint.drafting
    options = step_options(config, blueprint.model)
    options = dataclasses.replace(options, compute=blueprint.options)
    assert options.compute.impl == "triton"
    steps = build_steps(graph, drafting.drafter, options, jnp.zeros(blueprint.model.vocab_size))
    params = {"target": blueprint.specs, "draft": drafting.specs}
    params = jax.tree.map(lambda spec: jax.ShapeDtypeStruct(spec.shape, spec.dtype), params)
    state = jax.eval_shape(lambda: new_state(config, blueprint.model, drafting, blueprint.options))
    return steps, params, state


@pytest.mark.parametrize(
    ("settings", "kernels"),
    [
        (["model=tiny", *ASSISTANT], ["append_ring", "append_linear", "borrow_ring"]),
        (["model=random:31b/6"], ["append_ring", "append_linear"]),
        (["model=random:26b-a4b/6"], ["expert_down", "mixture_norm"]),
        (["model=random:e2b"], ["borrow_ring", "borrow_linear"]),
    ],
    ids=lambda x: x[0],
)
def test_every_chunk_and_round_lowers(settings, kernels):
    steps, params, state = made(settings)
    one = jax.ShapeDtypeStruct((1,), jnp.int32)
    with device_of_name("NVIDIA H200"):
        for chunk in (1, 17, 66):
            tokens = jax.ShapeDtypeStruct((1, chunk), jnp.int32)
            steps.prefill.trace(params, state, tokens, one, one).lower(lowering_platforms=("cuda",))
        kind = SamplerKind(draws=False, logprobs=False)
        text = steps.round.trace(params, state, kind).lower(lowering_platforms=("cuda",)).as_text()
    for kernel in kernels:
        assert f"carat_{kernel}" in text


def test_a_pass_of_uniform_rows_lowers_over_both_layouts():
    for layout, kernel in (("kv", "grouped_attention_kv"), ("v_rot", "grouped_attention_v_rot")):
        settings = ["model=random:31b/6", f"cache.global_layers={layout}", "decode.uniform_rows=4"]
        steps, params, state = made(settings)
        tokens, valid = (jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((2, 4), (2,)))
        with device_of_name("NVIDIA H200"):
            traced = steps.verify.trace(params, state.bank, tokens, valid)
            text = traced.lower(lowering_platforms=("cuda",)).as_text()
        for name in ("ring_attention", kernel):
            assert f"carat_{name}" in text
