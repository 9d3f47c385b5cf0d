"""The expert kernel against a float64 oracle under every kind of routing that could trip it.

On a CPU toy sizes run through the Pallas interpreter; with CARAT_TEST_GPU the matrices of the 26B,
a quarter of its experts, run through Triton.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import expert_mlp, expert_shares, product_tiles, route_experts, tiles
from pallas_kernels.product_tiles import ProductTile
from tests.kernels.bodies import relative_error
from tests.kernels.lowering import lower
from tests.oracle import gelu_tanh

ON_GPU = jax.default_backend() == "gpu"
IMPL = "triton" if ON_GPU else "interpret"
SIZES = (32, 2816, 704, 8) if ON_GPU else (16, 64, 48, 4)  # E, D, F, k
RUN = functools.partial(expert_mlp, impl=IMPL)
ROUTINGS = ("random", "one_expert", "all_distinct", "same_set", "some_without", "none")


def route(kind, num_rows, rng):
    """Choices [R, k] of one kind; E means no expert."""
    num_experts, _, _, top_k = SIZES
    random = np.array([rng.permutation(num_experts)[:top_k] for _ in range(num_rows)])
    if kind == "one_expert":  # every row takes expert 5 and nobody else
        return np.where(np.arange(top_k) == 1, 5, np.full_like(random, num_experts))
    if kind == "all_distinct":  # as few rows share an expert as can be
        return np.arange(num_rows * top_k).reshape(num_rows, top_k) % num_experts
    if kind == "same_set":
        return np.tile(random[:1], (num_rows, 1))
    if kind == "some_without":
        random[rng.uniform(size=random.shape) < 0.3] = num_experts
        random[::3] = num_experts
    return np.full_like(random, num_experts) if kind == "none" else random


@functools.cache
def matrices(dtype):
    """Random matrices of all experts, as the kernel takes them."""
    num_experts, hidden, width, _ = SIZES
    keys = jax.random.split(jax.random.key(0))
    gate_up = jax.random.normal(keys[0], (num_experts, 2, width, hidden), dtype)
    down = jax.random.normal(keys[1], (num_experts, hidden, width), dtype)
    return (gate_up * hidden**-0.5).astype(dtype), (down * width**-0.5).astype(dtype)


def make(kind, num_rows, dtype=jnp.bfloat16, poison=0.0):
    """The kernel's arguments; the experts nobody chose hold `poison`."""
    num_experts, hidden, _, top_k = SIZES
    rng = np.random.default_rng([num_rows, len(kind)])
    chosen = route(kind, num_rows, rng)
    unused = np.setdiff1d(np.arange(num_experts), chosen)
    gate_up, down = (matrix.at[unused].set(poison) for matrix in matrices(dtype))
    x = jnp.asarray(rng.standard_normal((num_rows, hidden), np.float32), dtype)
    weights = jnp.asarray(rng.uniform(0.05, 1, (num_rows, top_k)), jnp.float32)
    return x, weights, jnp.asarray(chosen, jnp.int32), gate_up, down


def exact(x, weights, chosen, gate_up, down):
    """Expert by expert, those that were chosen, in float64."""
    x, weights, chosen = (np.asarray(array).astype(np.float64) for array in (x, weights, chosen))
    out = np.zeros(x.shape)
    for expert in range(len(gate_up)):
        share = np.where(chosen == expert, weights, 0).sum(1)
        rows = np.flatnonzero((chosen == expert).any(1))
        if rows.size:
            two, last = (np.asarray(m[expert]).astype(np.float64) for m in (gate_up, down))
            gate, up = (x[rows] @ matrix.T for matrix in two)
            made = (gelu_tanh(gate) * up) @ last.T
            out[rows] += share[rows, None] * made
    return out


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ROUTINGS)
@pytest.mark.parametrize("num_rows", [1, 4, 8, 33, 64, 200] if ON_GPU else [1, 4, 19, 64, 100])
def test_any_routing_matches_float64(kind, num_rows):
    arrays = make(kind, num_rows)
    got = np.asarray(RUN(*arrays)).astype(np.float64)
    want = exact(*arrays)
    assert relative_error(got, want) <= 5e-3
    assert not got[(np.asarray(arrays[2]) == SIZES[0]).all(1)].any(), "no expert gives zeros"
    # then again bit for bit, and with NaN in all weights that nobody chose
    np.testing.assert_array_equal(got, np.asarray(RUN(*arrays)).astype(np.float64))
    poisoned = np.asarray(RUN(*make(kind, num_rows, poison=np.nan))).astype(np.float64)
    np.testing.assert_array_equal(got, poisoned)


@pytest.mark.gpu
@pytest.mark.parametrize("impl", ["xla", IMPL])
@pytest.mark.parametrize("num_rows", [4, 100])
def test_shares_are_those_of_each_expert_alone(num_rows, impl):
    arrays = make("some_without", num_rows, poison=np.nan)
    chosen, num_experts = np.asarray(arrays[2]), SIZES[0]
    shares = np.asarray(expert_shares(*arrays, impl=impl))
    assert shares.dtype == np.float32
    assert 0 < (chosen < num_experts).sum() < chosen.size
    for k in range(chosen.shape[1]):
        alone = np.where(np.arange(chosen.shape[1]) == k, chosen, num_experts)
        want, found = exact(*arrays[:2], alone, *arrays[3:]), chosen[:, k] < num_experts
        if found.any():
            assert relative_error(shares[found, k], want[found]) <= 5e-3


@pytest.mark.gpu
@pytest.mark.parametrize(("kind", "num_rows"), [("random", 8), ("random", 40), ("same_set", 40)])
def test_a_row_is_the_same_bit_for_bit_whoever_its_neighbours_are(kind, num_rows):
    x, weights, chosen, gate_up, down = make(kind, num_rows)
    together = np.asarray(RUN(x, weights, chosen, gate_up, down))
    for row in (0, 5, num_rows - 1):
        others = jnp.full_like(chosen, SIZES[0]).at[row].set(chosen[row])
        alone = np.asarray(RUN(x, weights, others, gate_up, down))
        np.testing.assert_array_equal(alone[row], together[row])


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [1, 4])
def test_sums_without_matrix_instructions_agree(num_rows):
    tile = (ProductTile(rows=num_rows, columns=16, block=16, warps=4, stages=1),) * 2
    arrays = make("random", num_rows)
    got = np.asarray(expert_mlp(*arrays, impl=IMPL, tile=tile)).astype(np.float64)
    assert relative_error(got, exact(*arrays)) <= 5e-3


def small(rng, chosen, num_experts):
    """The kernel's arguments for tokens of 32 numbers and experts of width 16."""
    num_rows, top_k = chosen.shape
    return [
        jnp.asarray(rng.standard_normal((num_rows, 32)), jnp.bfloat16),
        jnp.asarray(rng.uniform(0.05, 1, (num_rows, top_k)), jnp.float32),
        jnp.asarray(chosen, jnp.int32),
        jnp.asarray(rng.standard_normal((num_experts, 2, 16, 32)) / 6, jnp.bfloat16),
        jnp.asarray(rng.standard_normal((num_experts, 32, 16)) / 4, jnp.bfloat16),
    ]


@pytest.mark.parametrize("tile_rows", [8, 16, 32])
@pytest.mark.parametrize(("num_rows", "num_experts"), [(4, 11), (4, 12), (21, 12), (70, 12)])
def test_odd_numbers_of_experts_and_any_tiles(num_rows, num_experts, tile_rows):
    # three experts a token: fewer pairs than experts, as many, more, and sorted pairs
    rng = np.random.default_rng(num_rows)
    chosen = np.array([rng.permutation(num_experts)[:3] for _ in range(num_rows)])
    chosen[1:, 0] = np.where((chosen[1:] == 7).any(1), chosen[1:, 0], 7)  # one that is popular
    arrays = small(rng, chosen, num_experts)
    tile = (ProductTile(rows=tile_rows, columns=16, block=16, warps=4, stages=1),) * 2
    got = np.asarray(expert_mlp(*arrays, impl=IMPL, tile=tile)).astype(np.float64)
    assert relative_error(got, exact(*arrays)) <= 5e-3


def test_tiles_of_128_rows_that_an_expert_fills_or_just_misses():
    # given experts with 0 to 257 pairs, dealt so that no token has one of them twice
    counts = [0, 1, 127, 128, 129, 255, 256, 257]
    num_rows = sum(counts) // 3 + 1
    pairs = np.repeat(np.arange(len(counts)), counts)
    chosen = np.full(3 * num_rows, len(counts))
    chosen[: len(pairs)] = pairs
    chosen = chosen.reshape(3, num_rows).T
    assert all(len(set(row[row < 8])) == (row < 8).sum() for row in chosen)
    arrays = small(np.random.default_rng(0), chosen, len(counts))
    tile = (ProductTile(rows=128, columns=16, block=16, warps=8, stages=1),) * 2
    got = np.asarray(expert_mlp(*arrays, impl=IMPL, tile=tile)).astype(np.float64)
    assert relative_error(got, exact(*arrays)) <= 5e-3


@pytest.mark.skipif(ON_GPU, reason="the interpreter's own types")
@pytest.mark.parametrize("impl", ["xla", "interpret"])
def test_float32_is_exact_to_rounding(impl):
    for num_rows in (3, 80):
        arrays = make("some_without", num_rows, jnp.float32)
        assert relative_error(np.asarray(expert_mlp(*arrays, impl=impl)), exact(*arrays)) < 2e-6


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [1, 4, 33])
def test_the_router_kernel_chooses_what_its_oracle_does(num_rows):
    # given scores of about one, and two experts whose scores are equal
    num_experts, hidden, _, top_k = SIZES
    rng = np.random.default_rng(num_rows)
    proj = rng.standard_normal((num_experts, hidden))
    proj[3] = proj[num_experts - 2]
    arrays = rng.standard_normal((num_rows, hidden)) * 9, rng.uniform(0.5, 1.5, hidden), proj
    arrays = [jnp.asarray(a, jnp.bfloat16) for a in (*arrays, rng.uniform(0.5, 2, num_experts))]
    route = functools.partial(route_experts, *arrays, top_k=top_k, eps=1e-6)
    weights, chosen = map(np.asarray, route(impl=IMPL))
    want, ids = map(np.asarray, route(impl="xla"))
    assert chosen.dtype == np.int32
    np.testing.assert_array_equal(chosen, ids)
    np.testing.assert_allclose(weights, want, atol=2e-6)
    np.testing.assert_array_equal(weights, np.asarray(route(impl=IMPL)[0]))
    # a row's scores do not depend on how many rows there are
    alone = (arrays[0][-1:], *arrays[1:])
    alone = map(np.asarray, route_experts(*alone, top_k=top_k, eps=1e-6, impl=IMPL))
    for got, one in zip((weights, chosen), alone, strict=True):
        np.testing.assert_array_equal(got[-1:], one)
    # when every other row holds no token, these choose nobody and the others what they did
    is_token = np.arange(num_rows) % 2 == 1
    for impl in (IMPL, "xla"):
        again, masked = map(np.asarray, route(jnp.asarray(is_token), impl=impl))
        np.testing.assert_array_equal(masked[is_token], chosen[is_token])
        assert (masked[~is_token] == num_experts).all()
        np.testing.assert_allclose(again, weights, atol=2e-6)


def test_refusals_name_the_shape_and_the_limit():
    def refused(
        match, error=NotImplementedError, impl="triton", change=None, dtype=jnp.bfloat16, tile=None
    ):
        shapes = {"x": (2, 64), "weights": (2, 4), "chosen": (2, 4)}
        shapes |= {"gate_up": (16, 2, 48, 64), "down": (16, 64, 48)} | (change or {})
        kinds = {"weights": jnp.float32, "chosen": jnp.int32}
        arrays = [jax.ShapeDtypeStruct(s, kinds.get(n, dtype)) for n, s in shapes.items()]
        with pytest.raises(error, match=match):
            jax.eval_shape(lambda *a: expert_mlp(*a, impl=impl, tile=tile), *arrays)

    refused("Triton takes bfloat16", dtype=jnp.float32)
    refused("impl='cudnn'", error=ValueError, impl="cudnn")
    tile = [ProductTile(rows=rows, columns=16, block=16, warps=4, stages=1) for rows in (64, 16)]
    shapes = {"x": (65, 64), "weights": (65, 4), "chosen": (65, 4)}
    refused("cut once", error=ValueError, impl="interpret", change=shapes, tile=tile)
    refused("of rows=2", error=ValueError, change={"chosen": (2, 3)})
    refused("do not fit hidden=64", error=ValueError, change={"down": (16, 48, 64)})
    odd = {"gate_up": (16, 2, 40, 64), "down": (16, 64, 40)}
    refused("width 40 are not multiples of 16", change=odd)
    huge = {"gate_up": (2**18, 2, 64, 64), "down": (2**18, 64, 64)}
    refused("more numbers than an int32 counts", change=huge)


@pytest.mark.parametrize("device", ["NVIDIA H200", "NVIDIA A100-SXM4-80GB"])
@pytest.mark.parametrize("num_rows", [1, 4, 64, 512, 2048])
def test_the_kernel_lowers_with_tiles_that_fit(num_rows, device):
    num_experts, hidden, width, top_k = 128, 2816, 704, 8
    memory, processors = tiles.limits(device)
    chosen = product_tiles.expert_tiles(rows=num_rows, hidden=hidden, width=width, device=device)
    for tile, matrices, inputs, outputs in zip(
        chosen, (2, 1), (hidden, width), (width, hidden), strict=True
    ):
        assert tile.shared_memory(matrices) <= memory
        assert inputs % tile.block == 0 == outputs % tile.columns
        if num_rows <= 64:  # one token keeps every multiprocessor busy
            assert top_k * outputs // tile.columns >= processors
    of, bf16 = jax.ShapeDtypeStruct, jnp.bfloat16
    arrays = (
        of((num_rows, hidden), bf16),
        of((num_rows, top_k), jnp.float32),
        of((num_rows, top_k), jnp.int32),
        of((num_experts, 2, width, hidden), bf16),
        of((num_experts, hidden, width), bf16),
    )
    vectors = of((hidden,), bf16), of((num_experts, hidden), bf16), of((num_experts,), bf16)
    vectors += (of((num_rows,), jnp.bool_),)
    route = functools.partial(route_experts, top_k=top_k, eps=1e-6, impl="triton")
    assert 'name = "carat_router_choice"' in lower(route, (arrays[0], *vectors), device)
    text = lower(functools.partial(expert_mlp, impl="triton"), arrays, device)
    for name, tile in zip(("gate_up", "down"), chosen, strict=True):
        assert f'name = "carat_expert_{name}"' in text
        assert f"num_stages = {tile.stages} : i32" in text
