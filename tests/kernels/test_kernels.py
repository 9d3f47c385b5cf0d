"""Every implementation of every kernel against a float64 oracle, poison where nothing may look.

On a CPU the small cases run through `xla` and the Pallas interpreter. The first thing to run on a
GPU is `CARAT_TEST_GPU=1 python -m pytest tests/kernels -m gpu`: the real shapes through Triton.
"""

import concurrent.futures
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels as kernels
from pallas_kernels.tiles import Tile
from tests.kernels import bodies, cases

needs_gpu = pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a GPU")


def _tolerance(case, dtype):
    """Relative error: of rounding scores of size 30,000 in float32, and of bfloat16 weights."""
    if dtype == jnp.bfloat16 or abs(case.score_shift) > 1000:
        return 5e-3
    return 1e-4 if case.score_shift else 2e-6


def _check(case, run, dtype):
    """Runs a case with two kinds of poison and twice with one; asserts on every output."""
    inputs = cases.make(case, dtype, np.nan)
    want = cases.expected(case, inputs)
    got = np.asarray(run(*bodies.arrays(case, inputs, dtype)), np.float32)
    live = np.broadcast_to(cases.live(case)[..., None, None], got.shape)
    assert np.isfinite(got).all()
    assert bodies.relative_error(np.where(live, got, 0), want) <= _tolerance(case, dtype)
    assert not got[[end == 0 for end in case.ends]].any(), "an unused slot must give zeros"
    again = np.asarray(run(*bodies.arrays(case, inputs, dtype)), np.float32)
    np.testing.assert_array_equal(got, again)
    other = cases.make(case, dtype, 1e30)
    poisoned = np.asarray(run(*bodies.arrays(case, other, dtype)), np.float32)
    np.testing.assert_array_equal(got[live], poisoned[live])


@pytest.mark.parametrize("case", cases.SMALL, ids=str)
@pytest.mark.parametrize("impl", ["xla", "interpret"])
def test_small_cases_match_float64(case, impl):
    more = {"tile": bodies.few_splits(case)} if impl == "interpret" else {}
    _check(case, jax.jit(bodies.call(case, impl, **more)), jnp.float32)


@pytest.mark.parametrize("kernel", ["ring", "v_rot"])
def test_bfloat16_is_rounded_once_on_the_way(kernel):
    case = next(c for c in cases.SMALL if c.kernel == kernel)
    run = jax.jit(bodies.call(case, "interpret", tile=bodies.few_splits(case)))
    _check(case, run, jnp.bfloat16)


def test_a_ring_visited_in_a_loop_equals_one_block_a_program():
    case = next(c for c in cases.SMALL if c.kernel == "ring")
    tile = dataclasses.replace(bodies.tile(case), block=16, splits=2)
    _check(case, jax.jit(bodies.call(case, "interpret", tile=tile)), jnp.float32)


EDGES = (  # 64 positions a tile and 16 keys a block: edges and whole blocks, several of each
    cases.Case("edges", "prefill", (0, 67, 301), 70, 1, 1, 32, size=307, pad=7),
    cases.Case("edges_of_windows", "prefill", (0, 67, 301), 70, 1, 1, 32, size=307, window=128),
    cases.Case("edges", "prefill_ring", (0, 190, 500), 200, 1, 1, 32, size=144, window=128, pad=10),
)


@pytest.mark.parametrize("case", EDGES, ids=str)
def test_edges_and_whole_blocks_of_a_prefill_match_float64(case):
    tile = Tile(rows=64, block=16, splits=1, warps=4, stages=2)
    _check(case, jax.jit(bodies.call(case, "interpret", tile=tile)), jnp.float32)


@pytest.mark.parametrize("splits", [1, 3])
def test_programs_that_share_the_output_columns_agree(splits):
    case = next(c for c in cases.SMALL if c.name == "row_tiles")
    tile = Tile(rows=64, block=16, splits=splits, warps=4, stages=2, columns=16)
    _check(case, jax.jit(bodies.call(case, "interpret", tile=tile)), jnp.float32)


@pytest.mark.parametrize("kernel", ["grouped", "ring"])
def test_every_length_around_a_block_and_a_seam(kernel):
    # given: 60 slots of lengths 1..60 and 60 more of every fifth length to 355
    tile = Tile(rows=16, block=16, splits=1 if kernel == "ring" else 2, warps=4, stages=2)
    for ends in (tuple(range(1, 61)), tuple(range(60, 360, 5))):
        window = {"window": 20, "size": 32} if kernel == "ring" else {"size": 359}
        case = cases.Case("lengths", kernel, ends, 1, 2, 1, 32, **window)
        inputs = cases.make(case, jnp.float32, np.nan)
        # when
        run = jax.jit(bodies.call(case, "interpret", tile=tile))
        got = np.asarray(run(*bodies.arrays(case, inputs, jnp.float32)))
        # then: slot by slot, so that one bad length cannot hide
        want = cases.expected(case, inputs)
        for b, end in enumerate(ends):
            assert bodies.relative_error(got[b], want[b]) < 2e-6, f"length {end}"


def _grouped(num_slots, num_new, ends, starts, size=90):
    rng = np.random.default_rng(0)
    q = jnp.asarray(rng.standard_normal((num_slots, num_new, 4, 32)), jnp.float32)
    k, v = (
        jnp.asarray(rng.standard_normal((num_slots, 2, size, 32)), jnp.float32) for _ in range(2)
    )
    tile = Tile(rows=16, block=16, splits=3, warps=4, stages=2)
    positions = jnp.array(starts), jnp.array(ends)

    def call(q, k, v, starts, ends):
        return kernels.grouped_attention(q, k, v, starts, ends, impl="interpret", tile=tile)

    return call, (q, k, v, *positions)


def test_later_keys_and_neighbours_change_no_bit_of_a_row():
    # given: two slots; then slot 0 alone, and with three more keys behind its rows
    call, (q, k, v, starts, ends) = _grouped(2, 4, [64, 33], [61, 29])
    both = np.asarray(call(q, k, v, starts, ends))
    alone = np.asarray(call(q[:1], k[:1], v[:1], starts[:1], ends[:1]))
    later = np.asarray(call(q, k, v, starts, ends + 20))
    # then: bit for bit, across a power of two and a block boundary
    np.testing.assert_array_equal(both[0], alone[0])
    np.testing.assert_array_equal(both[0, :3], later[0, :3])
    np.testing.assert_array_equal(both[1], later[1])


@pytest.mark.parametrize("impl", ["xla", "interpret"])
def test_partials_of_two_halves_merge_to_the_whole(impl):
    # given: 80 keys, cut at 37; the second half seen as a cache of its own, 37 positions nearer
    call, (q, k, v, starts, ends) = _grouped(1, 4, [80], [76])
    whole = np.asarray(call(q, k, v, starts, ends))
    tile = Tile(rows=16, block=16, splits=3, warps=4, stages=2)

    def part(k, v, starts, ends):
        return kernels.grouped_attention(q, k, v, starts, ends, impl=impl, partials=True, tile=tile)

    first = part(k[:, :, :37], v[:, :, :37], starts, jnp.array([37]))
    second = part(k[:, :, 37:], v[:, :, 37:], starts - 37, ends - 37)
    empty = part(k, v, starts, jnp.array([0]))
    merged = kernels.merge_partials([first, empty, second], jnp.float32)
    np.testing.assert_allclose(np.asarray(merged), whole, rtol=0, atol=2e-6)


def test_lengths_past_the_cache_are_masked_not_shifted():
    call, (q, k, v, starts, ends) = _grouped(1, 4, [90], [86])
    past = np.asarray(call(q, k, v, starts, ends + 7))
    np.testing.assert_array_equal(past, np.asarray(call(q, k, v, starts, ends)))


def _refused(match, error=NotImplementedError, function=kernels.grouped_attention, **change):
    shape = {"q": (1, 4, 4, 32), "k": (1, 2, 64, 32), "v": (1, 2, 64, 32)}
    dtype, more = change.pop("dtype", jnp.bfloat16), change.pop("more", {})
    shape |= change
    q, k, v = (jax.ShapeDtypeStruct(shape[name], dtype) for name in "qkv")
    position = jax.ShapeDtypeStruct((1,), jnp.int32)
    with pytest.raises(error, match=match):
        jax.eval_shape(lambda *a: function(*a, **more), q, k, v, position, position)


def test_refusals_name_the_shape_and_the_limit():
    triton = {"impl": "triton"}
    _refused("float32.*bfloat16 only", dtype=jnp.float32, more=triton)
    wide = {"q": (1, 4, 4, 48), "k": (1, 2, 64, 48), "v": (1, 2, 64, 48)}
    _refused("head_dim 48 is not one of", more=triton, **wide)
    _refused("512 rows .* more than 256", q=(1, 256, 4, 32), more=triton)
    _refused("impl='cudnn'", error=ValueError, more={"impl": "cudnn"})
    _refused("do not match", error=ValueError, v=(1, 2, 63, 32))
    _refused("3 query heads do not divide", error=ValueError, q=(1, 4, 3, 32))
    ring = {"function": kernels.ring_attention}
    _refused("need a ring of 67 slots", error=ValueError, more={"window": 64}, **ring)
    odd = {"k": (1, 2, 70, 32), "v": (1, 2, 70, 32)}
    _refused("70 slots is not a multiple of 16", more={"window": 60, **triton}, **odd, **ring)
    many = {"q": (1, 17, 4, 32), "more": {"window": 40, **triton}}
    _refused("17 positions are more than 16", **many, **ring)


def test_without_a_name_the_kernel_follows_the_machine():
    _, arrays = _grouped(1, 4, [80], [76])
    q, k, v, starts, ends = (x.astype(jnp.bfloat16) if x.ndim == 4 else x for x in arrays)
    chosen = np.asarray(kernels.grouped_attention(q, k, v, starts, ends), np.float32)
    expected = "triton" if jax.default_backend() == "gpu" else "xla"
    named = np.asarray(kernels.grouped_attention(q, k, v, starts, ends, impl=expected), np.float32)
    np.testing.assert_array_equal(chosen, named)


@pytest.fixture(scope="module")
def compiled():
    """Every GPU case, compiled side by side."""
    if jax.default_backend() != "gpu":
        return {}

    def compile_one(case):
        run = jax.jit(bodies.call(case, "triton"))
        return case, run.lower(*bodies.shapes(case)).compile()

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        return dict(pool.map(compile_one, (*cases.SMALL, *cases.FULL)))


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("case", [*cases.SMALL, *cases.FULL], ids=str)
def test_triton_matches_float64(case, compiled):
    def run(q, caches, norm, starts, ends):
        norm = jnp.zeros((case.head_dim,), jnp.bfloat16) if norm is None else norm
        return compiled[case](q, caches, norm, starts, ends)

    _check(case, run, jnp.bfloat16)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("kernel", ["grouped", "ring"])
def test_triton_at_every_length(kernel):
    for first in range(0, len(cases.LENGTHS), 60):
        ends = cases.LENGTHS[first : first + 60]
        more = {"window": 64, "size": 96} if kernel == "ring" else {"size": max(ends)}
        case = cases.Case("lengths", kernel, ends, 1, 4, 1, 64, **more)
        inputs = cases.make(case, jnp.bfloat16, np.nan)
        run = jax.jit(bodies.call(case, "triton"))
        got = np.asarray(run(*bodies.arrays(case, inputs, jnp.bfloat16)), np.float32)
        want = cases.expected(case, inputs)
        for b, end in enumerate(ends):
            assert bodies.relative_error(got[b], want[b]) < 5e-3, f"length {end}"
