"""Caches are donated: every step gives back the buffers it was given, and copies none of them.

Read from the compiled steps themselves: what aliases what, and which instructions copy an array of
a cache's shape.
"""

import re

import jax
import numpy as np
import pytest

from carat_jax.decoding.steps import SamplerKind
from tests.engine.toy_engine import toy
from tests.toy_model import MAX_ROWS
from tests.toy_model import toy as named_toy

SLOTS, CONTEXT = 8, 512
DRAWN = SamplerKind(draws=True, logprobs=True)


def zeros(*shape, dtype=np.int32):
    return np.zeros(shape, dtype)


def arguments(name, model, num_slots=SLOTS):
    """The step and arguments to compile it for; the state or bank in them is donated."""
    state = model.state(num_slots, CONTEXT)
    one, slot = zeros(1), np.int32(1)
    logits = zeros(model.config.vocab_size, dtype=np.float32)
    return {
        "prefill": (model.params, state, zeros(1, 32), one, one),
        "short prefill": (model.params, state, zeros(1, MAX_ROWS), one, one),
        "score": (model.params, state, zeros(1, 32), one, one, zeros(1, 32)),
        "round": (model.params, state, DRAWN),
        "verify": (model.params, state.bank, zeros(num_slots, MAX_ROWS), zeros(num_slots)),
        "first": (state, logits, one, DRAWN),
        "fork": (state, np.int32(0), slot),
        "release": (state, slot, slot),
    }[name]


def compiled(name, model, num_slots=SLOTS):
    step = getattr(model.steps, name.split()[-1])
    return step.lower(*arguments(name, model, num_slots)).compile()


def num_bytes(tree) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


def cache_copies(text: str, shapes) -> list[str]:
    """Shapes, out of `shapes`, that a copy instruction of the compiled text makes."""
    made = re.findall(r"\w+\[([\d,]+)\]\S* copy(?:-start)?\(", text)
    return [shape for shape in made if tuple(map(int, shape.split(","))) in shapes]


IN_PLACE = ("short prefill", "round", "verify", "first", "fork", "release")


@pytest.mark.parametrize(
    ("name", "num_slots"), [*((name, SLOTS) for name in IN_PLACE), ("round", 1), ("verify", 1)]
)
def test_steps_that_write_in_place_copy_no_cache(name, num_slots):
    model = toy()
    executable = compiled(name, model, num_slots)
    state = model.state(num_slots, CONTEXT)
    donated = state.bank if name == "verify" else state
    assert executable.memory_analysis().alias_size_in_bytes == num_bytes(donated)
    shapes = {leaf.shape for leaf in jax.tree.leaves(state.bank.layers)}
    assert cache_copies(executable.as_text(), shapes) == []


@pytest.mark.parametrize("name", ["prefill", "score"])
def test_long_chunks_copy_rings_at_most_and_nothing_that_grows_with_the_context(name):
    # given a chunk that reads its rings before it overwrites them
    model = toy()
    executable = compiled(name, model)
    state = model.state(SLOTS, CONTEXT)
    assert executable.memory_analysis().alias_size_in_bytes == num_bytes(state)
    linear = {leaf.shape for leaf in jax.tree.leaves(state.bank.layers) if CONTEXT in leaf.shape}
    assert linear
    assert cache_copies(executable.as_text(), linear) == []


def test_copies_are_seen_where_there_are_some():
    cache = toy().state(SLOTS, CONTEXT).bank.layers[2].k
    for donated, num_copies in (((0,), 0), ((), 1)):
        write = jax.jit(lambda x: x.at[0].set(1.0), donate_argnums=donated)
        text = write.lower(cache).compile().as_text()
        assert len(cache_copies(text, {cache.shape})) == num_copies


@pytest.mark.parametrize("name", ["T4", "T4e"])
def test_every_donated_leaf_is_a_buffer_of_its_own(name):
    leaves = jax.tree.leaves(named_toy(name).state())
    pointers = {leaf.unsafe_buffer_pointer() for leaf in leaves}
    assert len(pointers) == len(leaves)


def test_a_donated_state_is_gone_and_its_buffers_live_on():
    model = toy()
    state = model.state()
    caches = jax.tree.leaves(state.bank.layers)
    before = {leaf.unsafe_buffer_pointer() for leaf in caches}
    after, _ = model.steps.round(model.params, state, SamplerKind(draws=False, logprobs=False))
    assert all(leaf.is_deleted() for leaf in caches)
    assert {leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(after.bank.layers)} == before
