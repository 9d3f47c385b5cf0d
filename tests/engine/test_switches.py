"""Every switch of the design changes speed, memory or rounding and nothing else, on `tiny`.

Runs on the CPU (kernels interpreted, few tokens) and, with CARAT_TEST_GPU, on a GPU (compiled).
"""

import functools
import os

import numpy as np
import pytest

import carat_jax

ON_GPU = bool(os.environ.get("CARAT_TEST_GPU"))
KERNELS = "triton" if ON_GPU else "interpret"
PROMPTS = ["Once upon a time", "One morning, Nell took her basket and walked to the market. " * 6]
ENGINE = {"max_batch": 2, "max_context": 256, "prefill_chunks": [32, 80]}
SWITCHES = {
    "paged": {"cache.local_layers": "paged"},
    "full": {"cache.local_layers": "full"},
    "v_rot": {"cache.global_layers": "v_rot"},
    "three_stage": {"attention.verify": "three_stage"},
    "three_stage_128": {"attention.verify": "three_stage", "attention.pad_keys": 128},
    "three_stage_v_rot": {"attention.verify": "three_stage", "cache.global_layers": "v_rot"},
    "per_head": {"attention.group_heads": False},
    "single_operations": {"attention.fuse_rows": False},
    "few_row_products": {"products.impl": KERNELS},
    "ngram": {"decode.drafter": "ngram", "decode.draft_len": 4},
    "assistant": {"decode.drafter": "assistant", "decode.draft_len": 3},
    "uniform_rows": {"decode.uniform_rows": 4},
    "rounds_per_call": {"decode.rounds_per_call": 8},
}


@functools.cache
def engine(dtype: str) -> carat_jax.Engine:
    """`tiny` in plain JAX."""
    return carat_jax.load("tiny", dtype=dtype, engine=ENGINE, attention={"impl": "xla"})


def generate(made: carat_jax.Engine, num_tokens: int):
    """Greedy answers with the log-probability of every id."""
    return made.generate(PROMPTS, temperature=0, max_tokens=num_tokens, logprobs=0)


@functools.cache
def plain_text() -> list[tuple[int, ...]]:
    """What the float32 engine says."""
    return [result.ids for result in generate(engine("float32"), 100)]


@pytest.mark.parametrize("name", SWITCHES)
def test_float32_greedy_text_is_the_same_with_every_switch(name):
    results = generate(engine("float32").variant(**SWITCHES[name]), 100)
    assert [result.ids for result in results] == plain_text()


def error(made: carat_jax.Engine, num_tokens: int) -> np.ndarray:
    """How far an engine's log-probabilities of its own greedy text are from float32's."""
    errors = []
    for result in generate(made, num_tokens):
        ids = [*result.prompt_ids, *result.ids]
        exact = engine("float32").score(ids, num_top=1)[len(result.prompt_ids) :]
        errors += [abs(a.logprob - b.logprob) for a, b in zip(result.logprobs, exact, strict=True)]
        # A choice may differ from float32's only where that is as good as undecided.
        assert max(b.top[0][1] - b.logprob for b in exact) < 0.25
    return np.array(errors)


@functools.cache
def plain_error(num_tokens: int) -> np.ndarray:
    """The bfloat16 error of plain JAX."""
    return error(engine("bfloat16"), num_tokens)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["plain", "v_rot", "paged", "three_stage", "per_head", "ngram"])
def test_kernels_are_no_less_accurate_than_plain_jax(name):
    if not ON_GPU and name not in ("plain", "v_rot"):
        pytest.skip("interpreted kernels are slow; the rest runs on a GPU")
    num_tokens = 100 if ON_GPU else 3
    switches = SWITCHES.get(name, {})
    if not ON_GPU:  # compiling interpreted kernels takes long: one chunk size
        switches = switches | {"engine.prefill_chunks": [80]}
        if name == "v_rot":  # interpreting a program a row of each norm is `plain`'s
            switches |= SWITCHES["single_operations"]
    made = engine("bfloat16").variant(**{"attention.impl": KERNELS, **switches})
    got, plain = error(made, num_tokens), plain_error(num_tokens)
    assert got.mean() <= 1.25 * plain.mean() + 0.005
    assert got.max() <= 2 * plain.max() + 0.01


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="needs a GPU")
def test_uniform_rows_are_bit_identical_on_the_gpu():
    told = []
    for drafter in ("none", "ngram"):
        decode = {"uniform_rows": 8, "drafter": drafter, "draft_len": 5}
        made = engine("bfloat16").variant(**{"attention.impl": None}, decode=decode)
        told.append(generate(made, 150))
    for plain, drafted in zip(*told, strict=True):
        assert drafted.ids == plain.ids
        assert drafted.logprobs == plain.logprobs
    assert sum(told[1][1].acceptance.accepted) > 0
