"""Tiles fit the devices they are chosen for, and depend on the shape alone."""

import dataclasses

import pytest

from pallas_kernels import tiles
from tests.kernels import bodies, cases

DEVICES = ("NVIDIA H200", "NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-80GB")


@pytest.mark.parametrize("device", DEVICES)
def test_every_declared_shape_fits_the_device(device):
    memory, processors = tiles.limits(device)
    for case in (*cases.SMALL, *cases.FULL):
        tile = bodies.tile(case, device)
        assert tile.shared_memory(case.head_dim, case.rotated) <= memory, case
        if case.kernel in ("grouped", "v_rot"):
            rows = case.num_new * case.heads // case.kv_heads
            parts = case.head_dim // (tile.columns or case.head_dim)
            programs = tile.splits * case.kv_heads * max(1, -(-rows // tile.rows)) * parts
            assert processors / 2 < programs <= processors, case


# Bytes that Triton 3.6 or XLA reported after compiling the kernel for compute capability 9.0.
COMPILED = [
    ("grouped", {"rows": 32, "block": 32, "warps": 4, "stages": 3}, 512, 0, 165888),
    ("grouped", {"rows": 16, "block": 32, "warps": 4, "stages": 3}, 512, 0, 148480),
    ("grouped", {"rows": 16, "block": 32, "warps": 4, "stages": 3}, 64, 0, 19456),
    ("v_rot", {"rows": 32, "block": 32, "warps": 4, "stages": 3}, 512, 128, 124928),
    ("v_rot", {"rows": 16, "block": 32, "warps": 4, "stages": 3}, 512, 128, 103424),
    ("prefill", {"rows": 64, "block": 32, "warps": 8, "stages": 2}, 512, 0, 196608),
    ("prefill_v_rot", {"rows": 64, "block": 32, "warps": 8, "stages": 3}, 512, 128, 204800),
    ("prefill_v_rot", {"rows": 64, "block": 32, "warps": 8, "stages": 1}, 512, 128, 147456),
    ("prefill_ring", {"rows": 128, "block": 32, "warps": 8, "stages": 3}, 256, 0, 163840),
    ("prefill_ring", {"rows": 128, "block": 64, "warps": 8, "stages": 2}, 256, 0, 196608),
    ("prefill_ring", {"rows": 64, "block": 64, "warps": 4, "stages": 3}, 256, 0, 229376),
    (
        "prefill",
        {"rows": 128, "block": 32, "warps": 8, "stages": 2, "columns": 256},
        512,
        0,
        229376,
    ),
    (
        "grouped",
        {"rows": 64, "block": 32, "warps": 4, "stages": 3, "columns": 256},
        512,
        0,
        212992,
    ),
]


@pytest.mark.parametrize(("kernel", "shape", "head_dim", "rotated", "measured"), COMPILED)
def test_the_budget_bounds_what_the_compiler_takes(kernel, shape, head_dim, rotated, measured):
    tile = tiles.Tile(splits=1, **shape)
    budget = tile.shared_memory(head_dim, rotated)
    assert measured <= budget <= 1.1 * measured, kernel


# The same for 8.0, where the weights are in shared memory and a block fewer is.
COMPILED_FOR_AN_A100 = [
    ({"rows": 64, "block": 32, "warps": 4, "stages": 2, "columns": 256}, 512, 0, 118784),
    ({"rows": 64, "block": 32, "warps": 8, "stages": 2}, 512, 128, 126976),
    ({"rows": 64, "block": 64, "warps": 4, "stages": 2}, 256, 0, 106496),
    ({"rows": 128, "block": 32, "warps": 8, "stages": 3}, 256, 0, 139264),
    ({"rows": 128, "block": 64, "warps": 8, "stages": 1}, 256, 0, 114688),
]


@pytest.mark.parametrize(("shape", "head_dim", "rotated", "measured"), COMPILED_FOR_AN_A100)
def test_the_budget_covers_the_weights_of_an_a100(shape, head_dim, rotated, measured):
    assert measured <= tiles.Tile(splits=1, **shape).shared_memory(head_dim, rotated)


def test_prefill_takes_128_rows_where_they_fit():
    def chosen(device, **shape):
        tile = tiles.prefill_tile(rows=4096, device=device, **shape)
        return tile.rows, tile.block, tile.warps, tile.stages, tile.columns

    hopper, _, ampere = DEVICES
    assert chosen(hopper, head_dim=512) == (128, 32, 8, 2, 256)
    assert chosen(hopper, head_dim=512, rotated=128) == (64, 32, 8, 3, 0)
    assert chosen(hopper, head_dim=256, capacity=1088) == (128, 64, 8, 2, 0)
    assert chosen(ampere, head_dim=512) == (64, 32, 4, 2, 256)


def test_a_tile_that_does_not_fit_is_refused_with_the_limit():
    tile = tiles.Tile(rows=64, block=32, splits=1, warps=8, stages=3)
    assert tile.shared_memory(512) > tiles.limits("NVIDIA H200")[0]
    small = {**tiles.DEVICES, "L4": (99 * 1024, 58)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiles, "DEVICES", small)
        with pytest.raises(NotImplementedError, match=r"head_dim 512 need .* NVIDIA L4 has 101376"):
            tiles.prefill_tile(rows=4096, head_dim=512, device="NVIDIA L4")


def test_an_unknown_device_is_refused_by_name():
    with pytest.raises(NotImplementedError, match="no tiles for device 'NVIDIA T4'"):
        tiles.limits("NVIDIA T4")


@pytest.mark.parametrize("field", ["rows", "block", "warps"])
def test_a_tile_is_validated_and_frozen(field):
    good = {"rows": 16, "block": 32, "splits": 1, "warps": 4, "stages": 1}
    with pytest.raises(ValueError, match=f"tile.{field}=3 must be a power of two"):
        tiles.Tile(**{**good, field: 3})
    with pytest.raises(dataclasses.FrozenInstanceError):
        tiles.Tile(**good).rows = 32


def test_the_pipeline_is_as_deep_as_the_device_allows():
    shape = {"rows": 32, "head_dim": 512, "kv_heads": 4}
    hopper = tiles.grouped_tile(**shape, device="NVIDIA H200")
    ampere = tiles.grouped_tile(**shape, device="NVIDIA A100-SXM4-80GB")
    assert (hopper.stages, hopper.splits) == (3, 33)
    assert (ampere.stages, ampere.splits) == (3, 27)


@pytest.mark.parametrize(
    ("slots", "kv_heads", "appends", "splits", "stages"),
    [
        # 31B, 17 blocks and the new rows: 288 programs of one would not all run at once.
        (1, 16, True, 6, 3),
        (2, 16, True, 4, 3),
        (4, 16, True, 2, 3),
        (5, 16, True, 3, 2),  # one split would leave 52 multiprocessors idle
        (8, 16, True, 1, 3),
        (9, 16, True, 3, 2),  # one split would keep 12 of them twice as long as the others
        (64, 16, True, 1, 2),
        (1, 8, True, 18, 1),  # 26B
        (1, 8, False, 17, 1),
        (2, 8, True, 6, 3),
    ],
)
def test_rings_share_the_device_evenly(slots, kv_heads, appends, splits, stages):
    tile = tiles.shared_ring_tile(
        sets=slots * kv_heads, appends=appends, rows=8, head_dim=256, capacity=1088,
        device="NVIDIA H200",
    )  # fmt: skip
    assert (tile.splits, tile.stages) == (splits, stages)


@pytest.mark.parametrize(
    ("slots", "size", "splits"),
    [(1, 8192, 33), (2, 8192, 16), (4, 8192, 8), (8, 2048, 4), (8, 8192, 8), (64, 8192, 8),
     (8, 131_072, 33)],
)  # fmt: skip
def test_a_slot_that_runs_alone_finds_programs_enough(slots, size, splits):
    shape = {"rows": 32, "head_dim": 512, "kv_heads": 4, "device": "NVIDIA H200"}
    assert tiles.grouped_tile(**shape, slots=slots, size=size).splits == splits


@pytest.mark.parametrize("device", ["NVIDIA H200", "NVIDIA A100-SXM4-80GB"])
@pytest.mark.parametrize("slots", [1, 5, 16, 64])
@pytest.mark.parametrize("rows", [1, 8, 32, 64])
def test_shared_tiles_fit_the_device(device, slots, rows):
    shape, (memory, _) = {"rows": rows, "device": device}, tiles.limits(device)
    ring = tiles.shared_ring_tile(
        **shape, head_dim=256, capacity=1088, sets=slots * 16, appends=True
    )
    assert ring.shared_memory(256) <= memory
    grouped = tiles.grouped_tile(**shape, head_dim=512, kv_heads=4, slots=slots, size=8192)
    assert grouped.shared_memory(512) <= memory
