"""Appending and attending in one kernel against float64 by position.

The oracle keeps every slot's history as a list and never sees a cache. On a GPU the same body runs
the real shapes through Triton: `CARAT_TEST_GPU=1 python -m pytest tests/kernels -m gpu`.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels as kernels
from pallas_kernels.tiles import Tile
from tests.kernels.bodies import relative_error
from tests.kernels.lowering import lower

EPS = 1e-6
needs_gpu = pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a GPU")


@dataclasses.dataclass(frozen=True)
class Case:
    """Slots that hold `starts` positions and get `valid` of `num_new` rows."""

    name: str
    starts: tuple[int, ...]
    valid: tuple[int, ...]
    num_new: int
    kv_heads: int
    group: int
    head_dim: int
    size: int
    window: int | None = None
    is_ring: bool = False
    k_eq_v: bool = False
    tile: Tile | None = None  # of the interpreter, which runs one program after another

    def __str__(self):
        return self.name


def tile(splits, block=16, rows=16, **more):
    """A small tile."""
    return Tile(rows=rows, block=block, splits=splits, warps=4, stages=2, **more)


# Three blocks and the new positions: a program for each.
RING = {"window": 20, "is_ring": True, "size": 48, "tile": tile(4)}
SMALL = (
    Case("ring_at_the_seam", (0, 5, 31, 46, 95, 1000), (3,) * 6, 3, 2, 2, 32, **RING),
    Case("ring_pad_rows", (0, 5, 47, 40), (1, 0, 2, 3), 3, 2, 2, 32, **RING),
    Case("ring_one_row", (0, 1, 31, 48, 49, 960), (1,) * 6, 1, 4, 2, 32, k_eq_v=True, **RING),
    *(Case(f"ring_in_{n}", (0, 5, 31, 46, 95, 1000), (3, 2, 3, 3, 0, 3), 3, 2, 2, 32,
           **RING | {"tile": tile(n)}) for n in (1, 2, 3)),
    Case("linear", (0, 14, 15, 16, 31, 44), (3, 2, 3, 3, 0, 3), 3, 2, 2, 32, 48, tile=tile(2)),
    Case("linear_one_split", (0, 14, 31), (4, 4, 4), 4, 2, 3, 32, 48, k_eq_v=True, tile=tile(1)),
    Case("linear_past_the_end", (45, 48), (4, 4), 4, 2, 2, 32, 48, tile=tile(3)),
    Case("shared_columns", (0, 15, 30), (4, 4, 2), 4, 2, 8, 32, 48, k_eq_v=True,
         tile=tile(3, rows=32, columns=16)),
)  # fmt: skip
LOCAL = {"window": 1024, "is_ring": True}
FULL = (
    *(Case(f"31b_local_{t}", (0, 1020, 9000), (t,) * 3, t, 16, 2, 256, 1088, **LOCAL)
      for t in (1, 4, 8, 16)),
    Case("31b_local_one_slot", (9000,), (4,), 4, 16, 2, 256, 1088, **LOCAL),
    Case("31b_local_ten_slots", (9000, 3) * 5, (4,) * 10, 4, 16, 2, 256, 1088, **LOCAL),
    Case("31b_global_ten_slots", (6001, 3) * 5, (4,) * 10, 4, 4, 8, 512, 6100, k_eq_v=True),
    *(Case(f"31b_global_{t}", (0, 29, 6001), (t,) * 3, t, 4, 8, 512, 6100, k_eq_v=True)
      for t in (1, 3, 4, 8)),
    Case("12b_global", (2050,), (4,), 4, 1, 16, 512, 4096, k_eq_v=True),
    Case("e4b_local", (700,), (4,), 4, 2, 4, 256, 576, window=512, is_ring=True),
    Case("e4b_local_sixteen_slots", (700, 3, 576, 0) * 4, (16,) * 16, 16, 2, 4, 256, 576,
         window=512, is_ring=True),
    Case("tiny_local", (100, 3), (4, 4), 4, 4, 2, 32, 128, window=64, is_ring=True),
    Case("tiny_global", (100, 3), (4, 4), 4, 1, 8, 64, 256, k_eq_v=True),
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Inputs:
    """The arrays of a call, in its order, and what each slot held before."""

    arrays: tuple[np.ndarray, ...]
    history: list[tuple[np.ndarray, np.ndarray]]


def make(case, dtype, poison):
    """Random inputs, exact in `dtype`; cache rows that nobody may see hold `poison`."""
    rng, slots = np.random.default_rng(0), len(case.starts)

    def normal(*shape):
        return rng.standard_normal(shape).astype(dtype).astype(np.float32)

    parts = case.group + (1 if case.k_eq_v else 2)
    qkv = normal(slots, case.num_new, case.kv_heads, parts, case.head_dim)
    q_norm, k_norm = (normal(case.head_dim) * 0.2 for _ in range(2))
    q_norm, k_norm = (x.astype(dtype).astype(np.float32) for x in (q_norm, k_norm))
    angles = rng.uniform(-3, 3, (slots, case.num_new, case.head_dim // 2))
    shape = (slots, case.kv_heads, case.size, case.head_dim)
    caches, history = [np.full(shape, poison, np.float32) for _ in range(2)], []
    for b, start in enumerate(case.starts):
        held = [normal(case.kv_heads, start, case.head_dim) for _ in range(2)]
        history.append(tuple(held))
        first = 0 if case.window is None else max(0, start - case.window + 1)
        row = np.arange(first, start)
        for cache, rows in zip(caches, held, strict=True):
            cache[b][:, row % case.size] = rows[:, first:]
    starts = np.array(case.starts, np.int32)
    ends = starts + np.array(case.valid, np.int32)
    tables = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    return Inputs((qkv, q_norm, k_norm, *tables, *caches, starts, ends), history)


def expected(case, inputs):
    """Outputs [B, T, N, H] of real rows, and the new rows' keys and values, in float64."""
    qkv, q_norm, k_norm, cos, sin = (x.astype(np.float64) for x in inputs.arrays[:5])
    half, group = case.head_dim // 2, case.group

    def norm(x, weight=1.0):
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + EPS) * weight

    def turn(x, c, s):
        return np.concatenate(
            [x[..., :half] * c - x[..., half:] * s, x[..., half:] * c + x[..., :half] * s], -1
        )

    out, new = np.zeros((*qkv.shape[:2], case.kv_heads, group, case.head_dim)), []
    for b, (keys, values) in enumerate(inputs.history):
        room = case.valid[b] if case.is_ring else min(case.valid[b], case.size - case.starts[b])
        for t in range(room):
            angle = cos[b, t], sin[b, t]
            k = turn(norm(qkv[b, t, :, group], k_norm), *angle)[:, None]
            v = norm(qkv[b, t, :, -1])[:, None]
            keys, values = np.concatenate([keys, k], 1), np.concatenate([values, v], 1)
            new.append((b, case.starts[b] + t, k[:, 0], v[:, 0]))
            reach = slice(None) if case.window is None else slice(-case.window, None)
            q = turn(norm(qkv[b, t, :, :group], q_norm), *angle)
            scores = np.einsum("kgh,kjh->kgj", q, keys[:, reach].astype(np.float64))
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            weights /= weights.sum(-1, keepdims=True)
            out[b, t] = np.einsum("kgj,kjh->kgh", weights, values[:, reach].astype(np.float64))
    return out.reshape(*qkv.shape[:2], -1, case.head_dim), new


def run(case, impl, inputs, dtype):
    """The public function on the case's arrays."""
    cast = [
        jnp.asarray(x, dtype if i in (0, 1, 2, 5, 6) else None) for i, x in enumerate(inputs.arrays)
    ]
    tile = case.tile if impl == "interpret" else None
    call = jax.jit(options(case, impl, tile=tile))
    return [np.asarray(x, np.float32) for x in call(*cast)]


def options(case, impl, tile=None):
    """A function of the arrays alone."""

    def call(*arrays):
        return kernels.append_attention(
            *arrays, group=case.group, eps=EPS, window=case.window, is_ring=case.is_ring,
            impl=impl, tile=tile,
        )  # fmt: skip

    return call


def check(case, impl, dtype, tolerance):
    """Outputs, written rows, untouched rows; with two poisons, and bit for bit again."""
    inputs = make(case, dtype, np.nan)
    want, new = expected(case, inputs)
    got, *caches = run(case, impl, inputs, dtype)
    live = np.zeros(want.shape[:2], bool)
    untouched = [np.ones(cache.shape[:3], bool) for cache in caches]
    for b, position, *rows in new:
        live[b, position - case.starts[b]] = True
        place = position % case.size
        for cache, row, rest in zip(caches, rows, untouched, strict=True):
            assert relative_error(cache[b, :, place], row) <= tolerance, (b, position)
            rest[b, :, place] = False
    assert relative_error(got[live], want[live]) <= tolerance
    if impl != "xla":  # a slot without new rows is not read
        assert not got[np.array(case.valid) == 0].any()
    for cache, before, rest in zip(caches, inputs.arrays[5:7], untouched, strict=True):
        np.testing.assert_array_equal(cache[rest], before[rest])
    np.testing.assert_array_equal(run(case, impl, inputs, dtype)[0], got)
    other = run(case, impl, make(case, dtype, 1e30), dtype)[0]
    np.testing.assert_array_equal(other[live], got[live])


@pytest.mark.parametrize("case", SMALL, ids=str)
@pytest.mark.parametrize("impl", ["xla", "interpret"])
def test_new_rows_are_written_and_seen_in_float32(case, impl):
    check(case, impl, np.float32, 4e-6)


def test_bfloat16_rounds_where_the_plain_code_rounds():
    check(SMALL[0], "interpret", jnp.bfloat16, 5e-3)


def check_borrowed(case, impl, dtype, tolerance):
    """Queries without keys of their own, over caches that hold the new positions already."""
    inputs = make(case, dtype, np.nan)
    want, new = expected(case, inputs)
    _, *caches = run(case, "xla", inputs, dtype)
    qkv, q_norm, _, cos, sin, _, _, starts, ends = inputs.arrays
    if not case.is_ring:
        ends = np.minimum(ends, case.size)
    tile = case.tile if impl == "interpret" else None
    cast = [jnp.asarray(x, dtype) for x in (qkv[:, :, :, : case.group], q_norm)]
    cast += [jnp.asarray(x) for x in (cos, sin)] + [jnp.asarray(x, dtype) for x in caches]
    more = {"window": case.window, "is_ring": case.is_ring, "impl": impl, "tile": tile}
    call = jax.jit(lambda *args: kernels.borrow_attention(*args, eps=EPS, **more))
    got = np.asarray(call(*cast, starts, ends), np.float32)
    live = np.zeros(want.shape[:2], bool)
    for b, position, *_ in new:
        live[b, position - case.starts[b]] = True
    assert relative_error(got[live], want[live]) <= tolerance


@pytest.mark.parametrize("case", SMALL, ids=str)
@pytest.mark.parametrize("impl", ["xla", "interpret"])
def test_borrowed_keys_are_seen_in_float32(case, impl):
    check_borrowed(case, impl, np.float32, 4e-6)


@pytest.mark.parametrize("case", FULL, ids=str)
@pytest.mark.parametrize("device", ["NVIDIA H200", "NVIDIA A100-SXM4-80GB"])
def test_every_declared_shape_lowers(case, device):
    text = lower(options(case, "triton"), shapes(case), device)
    assert ("carat_append_ring" if case.is_ring else "carat_append_linear") in text
    assert "output_operand_alias" in text, "the caches must be updated in place"


def shapes(case):
    """Shapes of the call's arrays in bfloat16."""
    of, slots = jax.ShapeDtypeStruct, len(case.starts)
    parts, half = case.group + (1 if case.k_eq_v else 2), case.head_dim // 2
    qkv = of((slots, case.num_new, case.kv_heads, parts, case.head_dim), jnp.bfloat16)
    weight, table = of((case.head_dim,), jnp.bfloat16), of((slots, case.num_new, half), jnp.float32)
    cache = of((slots, case.kv_heads, case.size, case.head_dim), jnp.bfloat16)
    position = of((slots,), jnp.int32)
    return qkv, weight, weight, table, table, cache, cache, position, position


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("case", FULL, ids=str)
def test_triton_matches_float64(case):
    check(case, "triton", jnp.bfloat16, 6e-3)
    check_borrowed(case, "triton", jnp.bfloat16, 6e-3)


GLOBAL = next(case for case in FULL if case.name == "31b_global_1")


def test_refusals_name_the_shape_and_the_limit():
    def refused(error, match, case, impl="triton"):
        with pytest.raises(error, match=match):
            jax.eval_shape(options(case, impl), *shapes(case))

    many = dataclasses.replace(FULL[0], num_new=17, size=1152)
    refused(NotImplementedError, "17 positions are more than 16", many)
    refused(NotImplementedError, "72 rows .* more than 64", dataclasses.replace(GLOBAL, num_new=9))
    short = dataclasses.replace(FULL[3], size=1024)
    refused(ValueError, "16 positions need a ring of 1039 slots", short)
    parts = dataclasses.replace(GLOBAL, group=8, k_eq_v=True)
    qkv, *rest = shapes(parts)
    wrong = jax.ShapeDtypeStruct((*qkv.shape[:3], 12, 512), qkv.dtype)
    with pytest.raises(ValueError, match="8 queries has 9 or 10 parts, not 12"):
        jax.eval_shape(options(parts, "triton"), wrong, *rest)
