"""Rings, linear caches and the bank, against numpy writes and a list of what was said."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from carat_jax.cache.bank import (
    bank_bytes,
    copy,
    empty_bank,
    insert,
    rollback,
    set_length,
)
from carat_jax.cache.linear import LinearCache
from carat_jax.cache.ring import RingCache, ring_capacity, ring_positions
from carat_jax.families import FAMILIES, from_hf
from carat_jax.numerics.attention import attend, visible
from carat_jax.numerics.options import ComputeOptions
from tests.toys import CONFIGS

W, MAX_ROWS = 4, 3
C = W + MAX_ROWS
KV_HEADS, DIM = 2, 3


def rows_of(positions, salt=0.0):
    """Keys [b, T, K, H] that tell their slot row, position, head and dimension."""
    b, t = positions.shape
    base = positions[:, :, None, None] + 1000.0 * np.arange(b)[:, None, None, None] + salt
    parts = np.arange(KV_HEADS)[:, None] * 0.25 + np.arange(DIM) * 0.0625
    return np.broadcast_to(base + parts, (b, t, KV_HEADS, DIM)).astype(np.float32)


def filled(kind, num_slots, capacity):
    shape = (num_slots, KV_HEADS, capacity, DIM)
    rng = np.random.default_rng(0)
    return kind(*(jnp.asarray(rng.normal(size=shape), jnp.float32) for _ in "kv"))


extend = jax.jit(
    lambda cache, k, v, starts, num_valid, slots: cache.extend(k, v, starts, num_valid, slots, W)[0]
)


def check_writes(cache, starts, num_rows, num_valid, slots, slot_of):
    """One extend against a numpy loop; `slot_of(position)` is None where nothing may land."""
    positions = starts[:, None] + np.arange(num_rows)
    k, v = rows_of(positions), rows_of(positions, salt=0.5)
    want = [np.array(cache.k), np.array(cache.v)]
    for b, t in np.ndindex(positions.shape):
        target = slot_of(positions[b, t]) if t < num_valid[b] else None
        if target is not None:
            want[0][slots[b], :, target] = k[b, t]
            want[1][slots[b], :, target] = v[b, t]
    got = extend(cache, k, v, starts, num_valid, slots)
    np.testing.assert_array_equal(got.k, want[0])
    np.testing.assert_array_equal(got.v, want[1])


@pytest.mark.parametrize("num_rows", [1, 2, C - W + 1, C - W + 2, C - 1, C, C + 1, 2 * C + 3])
def test_ring_writes_are_modular_at_every_offset(num_rows):
    # given one slot for each start in two turns of the ring, so that every offset is covered
    starts = np.arange(2 * C + 1, dtype=np.int32)
    slots = np.random.default_rng(1).permutation(len(starts) + 2)[: len(starts)].astype(np.int32)
    cache = filled(RingCache, len(starts) + 2, C)
    for valid in range(num_rows + 1):
        num_valid = np.full_like(starts, valid)
        check_writes(cache, starts, num_rows, num_valid, slots, lambda position: position % C)
    uneven = (starts % (num_rows + 1)).astype(np.int32)
    check_writes(cache, starts, num_rows, uneven, slots, lambda position: position % C)


@pytest.mark.parametrize("num_rows", [1, 3, 12])
def test_linear_writes_append_and_never_shift_at_the_limit(num_rows):
    limit = 10
    starts = np.arange(limit + 2, dtype=np.int32)
    cache = filled(LinearCache, len(starts), limit)
    slots = np.arange(len(starts), dtype=np.int32)[::-1].copy()
    for valid in {0, 1, num_rows - 1, num_rows}:
        check_writes(
            cache,
            starts,
            num_rows,
            np.full_like(starts, valid),
            slots,
            lambda position: position if position < limit else None,
        )


def test_writes_under_vmap_agree_with_the_batch():
    starts = np.arange(2 * C, dtype=np.int32)
    num_valid = starts % 3 + 1
    cache = filled(RingCache, len(starts), C)
    k = rows_of(starts[:, None] + np.arange(3))
    together = extend(cache, k, k, starts, num_valid, np.arange(len(starts)))
    alone = jax.vmap(
        lambda ck, cv, k, start, valid: extend(
            RingCache(ck[None], cv[None]),
            k[None],
            k[None],
            start[None],
            valid[None],
            jnp.zeros(1, jnp.int32),
        ).k[0]
    )(cache.k, cache.v, k, starts, num_valid)
    np.testing.assert_array_equal(alone, together.k)


def test_positions_follow_from_the_end_alone():
    ends = np.arange(3 * C)
    got = np.asarray(ring_positions(jnp.asarray(ends), C))
    for end, row in zip(ends, got, strict=True):
        held = dict.fromkeys(range(C), -1)
        held.update({p % C: p for p in range(end)})
        np.testing.assert_array_equal(np.where(row < 0, -1, row), [held[s] for s in range(C)])


def view_step(kind, num_rows):
    """One jitted extend that also says which keys each query sees."""

    @jax.jit
    def step(cache, starts, num_valid, slots):
        positions = starts[:, None] + jnp.arange(num_rows)
        k = jnp.broadcast_to(
            (positions + 1000 * slots[:, None])[:, :, None, None],
            (*positions.shape, KV_HEADS, DIM),
        ).astype(jnp.float32)
        window = W if kind is RingCache else None
        cache, view = cache.extend(k, -k, starts, num_valid, slots, window)
        return cache, view.k, view.v, visible(positions, view.positions, window)

    return step


@pytest.mark.parametrize("kind", [RingCache, LinearCache])
def test_queries_see_exactly_their_window_through_any_history(kind):
    # given steps of every kind (in place, longer than the slack, longer than the ring, empty)
    # and rollbacks at random, never more than C - W rows below the furthest row written
    rng = np.random.default_rng(2)
    steps = {n: view_step(kind, n) for n in (1, MAX_ROWS + 1, C, 2 * C)}
    num_slots, limit = 4, 400
    cache = filled(kind, num_slots, C if kind is RingCache else limit)
    cache = jax.tree.map(lambda x: x * jnp.nan, cache)  # nothing held: nothing may be seen
    lengths = np.zeros(num_slots, np.int32)
    furthest = lengths.copy()
    for _ in range(60):
        num_rows = int(rng.choice(list(steps)))
        slots = rng.permutation(num_slots)[: rng.choice([2, num_slots])].astype(np.int32)
        num_valid = rng.integers(0, num_rows + 1, len(slots)).astype(np.int32)
        cache, k, v, seen = steps[num_rows](cache, lengths[slots], num_valid, slots)
        k, v, seen = np.asarray(k), np.asarray(v), np.asarray(seen)
        for b, slot in enumerate(slots):
            for t in range(num_valid[b]):
                query = lengths[slot] + t
                first = max(0, query - W + 1) if kind is RingCache else 0
                want = [1000.0 * slot + p for p in range(first, query + 1)]
                keys = k[b][:, seen[b, t]]
                order = np.argsort(keys[0, :, 0])
                for head, dim in np.ndindex(KV_HEADS, DIM):
                    assert keys[head, order, dim].tolist() == want
                    values = v[b][head, seen[b, t], dim]
                    assert values[order].tolist() == [-x for x in want]
        lengths[slots] += num_valid
        furthest = np.maximum(furthest, lengths)
        floor = np.maximum(furthest - (C - W), 0)
        lengths = rng.integers(floor, lengths + 1).astype(np.int32)
        if lengths.max() > limit - 2 * C:
            lengths[:], furthest[:] = 0, 0  # every slot is used again, over old rows


def test_capacity_leaves_room_for_a_step_and_its_rollback():
    assert ring_capacity(1024, 5) == 1029
    assert ring_capacity(1024, 5, block=64) == 1088
    assert ring_capacity(1019, 5, block=64) == 1024


# The bank.


@pytest.fixture
def bank():
    """A bank of T4e whose every entry differs and whose slots hold 5, 20 and 33 positions."""
    bank = empty_bank(from_hf(CONFIGS["T4e"]), 3, 40, MAX_ROWS, jnp.float32)
    rng = np.random.default_rng(3)
    layers = jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape), x.dtype), bank.layers)
    return dataclasses.replace(bank, layers=layers, lengths=jnp.asarray([5, 20, 33], jnp.int32))


def slot_rows(bank, slot):
    return [np.asarray(leaf[slot]) for leaf in jax.tree.leaves(bank)]


def assert_same_slot(one, slot, other, other_slot):
    for a, b in zip(slot_rows(one, slot), slot_rows(other, other_slot), strict=True):
        np.testing.assert_array_equal(a, b)


def test_only_owning_layers_have_a_cache(bank):
    assert sorted(bank.layers) == [0, 1, 2, 3]
    kinds = [type(bank.layers[i]) for i in range(4)]
    assert kinds == [RingCache, RingCache, LinearCache, RingCache]
    assert bank.layers[2].k.shape == (3, 2, 40, 32)
    assert bank.layers[3].k.shape == (3, 2, 8 + MAX_ROWS, 16)


def test_an_empty_bank_can_be_donated_leaf_by_leaf():
    bank = empty_bank(from_hf(CONFIGS["T4"]), 2, 16, MAX_ROWS, jnp.bfloat16)
    pointers = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(bank)]
    assert len(set(pointers)) == len(pointers)


def test_bytes_are_those_of_the_arrays(bank):
    config = from_hf(CONFIGS["T4e"])
    told = bank_bytes(config, 3, 40, MAX_ROWS, jnp.float32)
    assert told == sum(x.nbytes for x in jax.tree.leaves(bank.layers))


@pytest.mark.parametrize(
    ("size", "bytes_per_token", "window_bytes"),
    [
        ("e2b", 6_144, 6 << 20),
        ("e4b", 16_384, 20 << 20),
        ("12b", 16_384, 320 << 20),
        ("31b", 81_920, 800 << 20),
    ],
)
def test_bytes_of_the_released_sizes(size, bytes_per_token, window_bytes):
    def size_at(context, rows):
        return bank_bytes(FAMILIES[size], 1, context, rows, jnp.bfloat16)

    assert size_at(101, 0) - size_at(100, 0) == bytes_per_token
    assert size_at(100, 0) - 100 * bytes_per_token == window_bytes


def test_copy_clones_one_slot_and_leaves_the_others(bank):
    got = jax.jit(copy)(bank, jnp.int32(1), jnp.int32(2))
    for slot, source in ((0, 0), (1, 1), (2, 1)):
        assert_same_slot(got, slot, bank, source)


def test_insert_puts_a_single_bank_into_its_slot(bank):
    single = empty_bank(from_hf(CONFIGS["T4e"]), 1, 40, MAX_ROWS, jnp.float32)
    single = dataclasses.replace(
        single,
        layers=jax.tree.map(lambda x: x + 7, single.layers),
        lengths=jnp.asarray([9], jnp.int32),
    )
    got = jax.jit(insert)(bank, jnp.int32(1), single)
    assert_same_slot(got, 1, single, 0)
    assert_same_slot(got, 0, bank, 0)
    assert_same_slot(got, 2, bank, 2)


def test_set_length_changes_one_length_and_no_row(bank):
    got = jax.jit(set_length)(bank, jnp.int32(2), jnp.int32(0))
    assert got.lengths.tolist() == [5, 20, 0]
    for a, b in zip(jax.tree.leaves(got.layers), jax.tree.leaves(bank.layers), strict=True):
        np.testing.assert_array_equal(a, b)


def test_rollback_reaches_as_far_as_the_ring_keeps(bank):
    for back in range(MAX_ROWS + 1):
        assert rollback(bank, 1, 20 - back, held=20).lengths.tolist() == [5, 20 - back, 33]
    with pytest.raises(ValueError, match=r"from 20 to 16 .* 3 rows"):
        rollback(bank, 1, 16, held=20)
    with pytest.raises(ValueError, match="from 20 to 21"):
        rollback(bank, 1, 21, held=20)


@pytest.mark.parametrize("num_rows", [16, 17, 32, 65, 66])
def test_a_chunk_of_any_length_finds_a_kernel_over_its_ring(num_rows):
    # given a ring with room for 65 rows beyond its window, of which a kernel takes 16 at once
    rng, shape = np.random.default_rng(num_rows), (1, 1, 128, 32)
    window, starts, num_valid = 64, jnp.array([150]), jnp.array([num_rows - 1])

    def normal(*shape):
        return jnp.asarray(rng.standard_normal(shape), jnp.float32)

    ring = RingCache(normal(*shape), normal(*shape))
    k, v, q = normal(1, num_rows, 1, 32), normal(1, num_rows, 1, 32), normal(1, num_rows, 2, 32)
    positions = starts[:, None] + jnp.arange(num_rows)
    out = {}
    for impl in ("xla", "interpret"):
        _, view = ring.extend(k, v, starts, num_valid, None, window)
        out[impl] = attend(q, positions, view, window, ComputeOptions(impl=impl))[:, :-1]
    np.testing.assert_allclose(out["interpret"], out["xla"], rtol=2e-5, atol=2e-5)
