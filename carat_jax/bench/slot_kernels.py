"""Slots that share the device in `bench.kernels`: the tiles for all slots against one slot's.

Races `borrow_attention`, the reading half of the kernel that decode and verify run, over rings and
over global caches whose slots are equally long, of many lengths, or of which one alone runs.
"""

import functools

import jax
import jax.numpy as jnp

from carat_jax.bench.kernel_race import checked_race, random_array
from pallas_kernels import borrow_attention, reference, tiles

CAPACITY, WINDOW, SIZE, KEYS = 1088, 1024, 8192, 6000
LENGTHS = {
    "equal": lambda slots: [KEYS] * slots,
    "uneven": lambda slots: [KEYS * (slot + 1) // slots for slot in range(slots)],
    "one runs": lambda slots: [KEYS] + [0] * (slots - 1),
}


def _race(records, fixed, lengths, num_new, kv_heads, group, head_dim, size, options, rivals):
    """One race; `rivals` are tiles by name, None for the choice."""
    slots, rings = len(lengths), max(2, 8 // len(lengths))
    shape, eps = (slots, kv_heads, size, head_dim), 1e-6
    layers = [(random_array(2 * i, shape), random_array(2 * i + 1, shape)) for i in range(rings)]
    x = random_array(99, (slots, num_new, kv_heads, group, head_dim))
    tables = [jnp.full((slots, num_new, head_dim // 2), angle) for angle in (1.0, 0.0)]
    ends = jnp.array(lengths, jnp.int32)
    starts = jnp.maximum(ends - num_new, 0)

    def call(function, q, k, v, **more):
        norm = jnp.full((head_dim,), 0.1, q.dtype)
        out = function(q, norm, *tables, k, v, starts, ends, eps=eps, **options, **more)
        return out.reshape(q.shape)

    oracle = jax.jit(functools.partial(call, reference.borrow_attention))(x, *layers[0])
    variants = {
        name: (functools.partial(call, borrow_attention, impl="triton", tile=tile), "cache")
        for name, tile in rivals.items()
    }
    fixed |= {"slots": slots, "positions": num_new}
    checked_race(records, fixed, variants, oracle, x, {"cache": layers}, length=24)


def slot_races(records, device):
    """Every race, on a device of this kind."""
    for slots, num_new in ((n, t) for n in (1, 2, 4, 5, 8, 9) for t in (1, 4)):
        one = tiles.ring_tile(rows=2 * num_new, head_dim=256, capacity=CAPACITY, device=device)
        options = {"window": WINDOW, "is_ring": True}
        fixed = {"case": "slots", "kernel": "ring", "lengths": "equal"}
        rivals = {"shared": None, "a block a program": one}
        shape = num_new, 16, 2, 256, CAPACITY
        _race(records, fixed, LENGTHS["equal"](slots), *shape, options, rivals)
    for slots, num_new in ((n, t) for n in (2, 4, 8) for t in (1, 4)):
        one = tiles.grouped_tile(rows=8 * num_new, head_dim=512, kv_heads=4, device=device)
        for name, lengths in LENGTHS.items():
            fixed = {"case": "slots", "kernel": "global", "lengths": name}
            rivals = {"shared": None, "as for one slot": one}
            _race(records, fixed, lengths(slots), num_new, 4, 8, 512, SIZE, {}, rivals)
