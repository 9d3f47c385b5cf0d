"""The estimate of a step's workspace against what the compiler says it needs.

It must never be below, and not so far above that it would refuse what fits.
"""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from carat_jax.config import read_settings
from carat_jax.decoding.steps import SamplerKind, StepOptions, build_steps
from carat_jax.engine.api import draw
from carat_jax.engine.memory import new_state
from carat_jax.families import FAMILIES, from_hf
from carat_jax.model.checkpoint import TINY
from tests.toys import CONFIGS, config_json

DRAWN = SamplerKind(draws=True, logprobs=True)


def needed(model, steps, **settings) -> tuple[int, int]:
    """(bytes the neediest of `steps` takes, the estimate); nothing is allocated."""
    config = read_settings(keywords=settings).build()
    graph, plan = draw(config, model, TINY)
    drafting = plan.drafting
    params, draft = (
        jax.tree.map(lambda spec: jax.ShapeDtypeStruct(spec.shape, spec.dtype), specs)
        for specs in (plan.specs, drafting.specs)
    )
    params = {"target": params, "draft": draft}
    state = jax.eval_shape(lambda: new_state(config, model, drafting, plan.options))
    options = StepOptions(plan.options, num_top=20)
    bias = jnp.zeros(model.vocab_size)
    built = build_steps(graph, drafting.drafter, options, bias)
    chunk, one = np.zeros((1, config.engine.prefill_chunks[-1]), np.int32), np.zeros(1, np.int32)
    calls = {
        "prefill": (params, state, chunk, one, one),
        "score": (params, state, chunk, one, one, chunk),
        "round": (params, state, DRAWN, None),
        "first": (state, np.zeros(model.vocab_size, np.float32), one, DRAWN),
    }
    found = []
    for name in steps:
        stats = getattr(built, name).lower(*calls[name]).compile().memory_analysis()
        found.append(stats.temp_size_in_bytes)
    return max(found), plan.memory().workspace


MODELS = {"tiny": FAMILIES["tiny"]} | {name: from_hf(raw) for name, raw in CONFIGS.items()}
SHORT = [8]  # a chunk that needs less than a round


@pytest.fixture
def small(tmp_path):
    """The folder of a smaller model, without weights."""
    (tmp_path / "config.json").write_text(json.dumps(config_json(CONFIGS["T4"])))
    return tmp_path


def case(model, steps, chunks, **settings):
    settings = {"dtype": "float32", "engine.prefill_chunks": chunks} | settings
    return pytest.param(MODELS[model], steps.split(), settings, id=f"{model} {steps} {settings}")


@pytest.mark.parametrize(
    ("model", "steps", "settings"),
    [
        case("tiny", "prefill", [32, 512]),
        case("tiny", "round", SHORT, dtype="bfloat16", **{"engine.max_batch": 1}),
        case("tiny", "round", SHORT, **{"engine.max_batch": 32, "engine.max_context": 256}),
        case("tiny", "round", SHORT, **{"cache.local_layers": "paged"}),
        case("T4e", "prefill score first", [32]),
        case("31b", "prefill", [32], **{"decode.drafter": "model"}),
        case("26b", "prefill", [32]),
        case("26b", "round", SHORT, **{"engine.max_batch": 8}),
        case("26b", "prefill", [32], **{"moe.impl": "ragged_dot"}),
        case("26b", "round", SHORT, **{"moe.impl": "ragged_dot", "engine.max_batch": 8}),
        case("26b", "prefill", [32], dtype="bfloat16", **{"moe.impl": "ragged_dot"}),
    ],
)
def test_the_estimate_covers_the_compilers_figure(model, steps, settings, small):
    if settings.get("decode.drafter") == "model":
        settings = settings | {"decode.draft_model": str(small)}
    exact, estimate = needed(model, steps, **settings)
    assert exact <= estimate <= 4 * exact
