"""The experts of Gemma 4 26B-A4B in `bench.kernels`: the kernel against plain JAX, and its tiles.

Choices are drawn independently for each token, so that tokens share as few experts as tokens can;
bytes are those of the experts that were chosen, each counted once.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from carat_jax.bench.kernel_race import checked_race, random_array
from carat_jax.families import FAMILIES
from carat_jax.model.moe import Router
from carat_jax.model.params import merge, random_params, split
from carat_jax.numerics.experts import expert_mlp as expert_products
from pallas_kernels import expert_mlp, reference
from pallas_kernels.product_tiles import FEW_TOKENS, ProductTile, expert_tiles
from pallas_kernels.tiles import next_power_of_two

MODEL = FAMILIES["26b-a4b"]


def _expert_layers(num_rows, count=3):
    """Layers of the mixture, each with choices of its own: (weights, chosen, gate_up, down)."""
    spec, hidden = MODEL.layer(0), MODEL.hidden_size
    num_experts, width, top_k = spec.num_experts, spec.expert_width, spec.top_k_experts
    layers = []
    for i in range(count):
        scores = jax.random.uniform(jax.random.key(i), (num_rows, num_experts))
        weights, chosen = jax.lax.top_k(scores, top_k)
        gate_up = random_array(2 * i, (num_experts, 2, width, hidden), hidden**-0.5)
        down = random_array(2 * i + 1, (num_experts, hidden, width), width**-0.5)
        layers.append((weights / top_k, chosen, gate_up, down))
    return layers


def experts(records, ceiling, num_rows, tiles=None):
    """A layer's experts for a few tokens, each with choices of its own; or tiles of the kernel."""
    layers = _expert_layers(num_rows)
    x = random_array(99, (num_rows, MODEL.hidden_size))
    oracle = jax.jit(reference.expert_mlp)(x, *layers[0])
    read = float(np.mean([len(np.unique(chosen)) for _, chosen, *_ in layers]))
    expert = (layers[0][2][0].size + layers[0][3][0].size) * 2
    fixed = {"case": "experts", "rows": num_rows, "experts_read": read}

    def race(variants, num_read=read, **timing):
        cells = {name: (run, "experts") for name, run in variants.items()}
        more = {"moved": dict.fromkeys(variants, num_read * expert), "ceiling": ceiling}
        checked_race(records, fixed, cells, oracle, x, {"experts": layers}, **more, **timing)

    run = functools.partial(expert_mlp, impl="triton")
    if tiles is not None:
        race({str(tile): functools.partial(run, tile=tile) for tile in tiles}, length=60)
        return
    race({"triton": run}, length=60)
    dense = functools.partial(expert_products, impl="dense")
    race({"dense": dense}, MODEL.num_experts, length=6)
    # Lowered to every expert for every pair it takes up to half a second.
    ragged = functools.partial(expert_products, impl="ragged_dot")
    race({"ragged_dot": ragged}, length=2, rounds=2, calls=2)
    _routed(records, fixed, x, layers, read * expert, ceiling)


def _routed(records, fixed, x, layers, moved, ceiling):
    """The kernel with its router before it, as a layer runs them."""
    graph, specs = split(Router(MODEL, 0, jnp.bfloat16))
    routers = [(random_params(specs, seed), *arrays[2:]) for seed, arrays in enumerate(layers)]

    def run(x, router, gate_up, down, impl="triton"):
        weights, chosen = merge(graph, router)(x[None], impl)
        return expert_products(x, weights[0], chosen[0], gate_up, down, impl)

    oracle = jax.jit(functools.partial(run, impl="dense"))(x, *routers[0])
    variants, more = {"triton_and_router": (run, "routed")}, {"length": 60, "ceiling": ceiling}
    moved = {"triton_and_router": moved}
    checked_race(records, fixed, variants, oracle, x, {"routed": routers}, moved=moved, **more)


def expert_tile_candidates(num_rows):
    """Tiles of both products: each against the choice of `tiles` for the other."""
    gate_ups = [
        *((16, 128, 4, 4), (16, 256, 4, 3), (32, 64, 4, 4), (32, 256, 4, 3), (32, 128, 2, 4)),
        *((32, 128, 8, 4), (32, 128, 4, 3), (32, 128, 4, 5), (64, 64, 4, 4), (64, 128, 8, 3)),
    ]
    downs = [
        *((16, 64, 2, 4), (32, 64, 2, 4), (32, 64, 4, 4), (64, 64, 2, 4), (64, 64, 4, 3)),
        *((64, 64, 4, 6), (64, 64, 8, 4), (128, 64, 4, 4), (128, 64, 8, 4)),
    ]
    # Of sorted pairs, both products in tiles of as many rows; each against the first of the other.
    many = {
        64: ([(64, 64, 4, 4), (64, 64, 4, 3)], [(128, 64, 4, 4), (128, 64, 4, 3), (256, 64, 8, 3)]),
        128: (
            [(64, 64, 8, 3), (64, 64, 8, 4), (64, 64, 4, 3), (64, 128, 8, 2), (64, 32, 8, 6)],
            [(128, 64, 8, 3), (128, 64, 8, 4), (128, 64, 4, 3), (256, 64, 8, 3), (64, 64, 4, 3)],
        ),
        256: ([(64, 64, 8, 3)], [(128, 64, 8, 3)]),
    }
    names = ("columns", "block", "warps", "stages")
    first, second = expert_tiles(
        rows=num_rows,
        hidden=MODEL.hidden_size,
        width=MODEL.layer(0).expert_width,
        device=jax.devices()[0].device_kind,
    )

    def made(sizes, rows=first.rows):
        return ProductTile(rows=rows, **dict(zip(names, sizes, strict=True)))

    yield first, second
    if num_rows > FEW_TOKENS:
        for rows, (ups, ends) in many.items():
            yield from ((made(sizes, rows), made(ends[0], rows)) for sizes in ups)
            yield from ((made(ups[0], rows), made(sizes, rows)) for sizes in ends[1:])
        return
    if num_rows > first.rows:  # tiles that hold more tokens than an expert is likely to have
        yield from (
            tuple(dataclasses.replace(t, rows=n) for t in (first, second)) for n in (32, 64)
        )
    yield from ((made(sizes), second) for sizes in gate_ups)
    yield from ((first, made(sizes)) for sizes in downs)
    if num_rows <= 4:  # without matrix instructions
        rows = next_power_of_two(num_rows)
        narrow = [(16, 128, 4, 1), (16, 256, 4, 1), (32, 64, 4, 1), (32, 128, 8, 1), (16, 64, 2, 1)]
        yield from ((made(sizes, rows), second) for sizes in narrow)
        narrow = [(16, 64, 2, 1), (32, 64, 4, 1), (64, 64, 4, 1), (64, 64, 8, 1)]
        yield from ((first, made(sizes, rows)) for sizes in narrow)
