"""Slots that share the device in `bench.kernels`: the tiles for all slots against one slot's.

Races `borrow_attention`, the reading half of the kernel that decode and verify run, over rings and
over global caches whose slots are equally long, of many lengths, or of which one alone runs.
"""

import functools

import jax
import jax.numpy as jnp

from carat_jax.bench.kernel_race import (
    CAPACITY,
    GLOBAL,
    LOCAL,
    WINDOW,
    checked_race,
    random_array,
)
from pallas_kernels import borrow_attention, reference, tiles

SIZE, KEYS = 8192, 6000
LENGTHS = {
    "equal": lambda slots: [KEYS] * slots,
    "uneven": lambda slots: [KEYS * (slot + 1) // slots for slot in range(slots)],
    "one runs": lambda slots: [KEYS] + [0] * (slots - 1),
}


def _race(records, shape, size, lengths, num_slots, num_new, one, **options):
    """The tile for all slots against `one`, a slot's, over caches of `size` rows."""
    kv_heads, head_dim = shape["kv_heads"], shape["head_dim"]
    cache, count = (num_slots, kv_heads, size, head_dim), max(2, 8 // num_slots)
    layers = [(random_array(2 * i, cache), random_array(2 * i + 1, cache)) for i in range(count)]
    x = random_array(99, (num_slots, num_new, kv_heads, shape["heads"] // kv_heads, head_dim))
    angles = [jnp.full((num_slots, num_new, head_dim // 2), value) for value in (1.0, 0.0)]
    ends = jnp.array(LENGTHS[lengths](num_slots), jnp.int32)
    starts = jnp.maximum(ends - num_new, 0)

    def call(function, q, k, v, **more):
        norm = jnp.full((head_dim,), 0.1, q.dtype)
        out = function(q, norm, *angles, k, v, starts, ends, eps=1e-6, **options, **more)
        return out.reshape(q.shape)

    oracle = jax.jit(functools.partial(call, reference.borrow_attention))(x, *layers[0])
    run = functools.partial(call, borrow_attention, impl="triton")
    variants = {"shared": (run, "cache"), "one slot's": (functools.partial(run, tile=one), "cache")}
    fixed = {"case": "slots", **shape, **options, "lengths": lengths}
    fixed |= {"slots": num_slots, "positions": num_new}
    checked_race(records, fixed, variants, oracle, x, {"cache": layers}, length=24)


def slot_races(records, device):
    """Every race, on a device of this kind."""
    for num_slots, num_new in ((n, t) for n in (1, 2, 4, 5, 8, 9) for t in (1, 4)):
        one = tiles.ring_tile(rows=2 * num_new, head_dim=256, capacity=CAPACITY, device=device)
        ring = {"window": WINDOW, "is_ring": True}
        _race(records, LOCAL, CAPACITY, "equal", num_slots, num_new, one, **ring)
    for num_slots, num_new in ((n, t) for n in (2, 4, 8) for t in (1, 4)):
        one = tiles.grouped_tile(rows=8 * num_new, head_dim=512, kv_heads=4, device=device)
        for lengths in LENGTHS:
            _race(records, GLOBAL, SIZE, lengths, num_slots, num_new, one)
