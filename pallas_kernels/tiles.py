"""Tile choices of the attention kernels: data with a computed shared-memory budget.

A tile is frozen and validated; the choice is a function of the kernel, the shape and the device and
of nothing that varies at run time, such as a length or who else runs. Key blocks are dealt to the
splits in turn (block i belongs to split i mod splits), so a position's sum is taken in the same
order at every length. Kernels that read caches as they are, with the new rows in them, give decode
and verify the same bits, in an engine of any number of slots; those that append or borrow take the
number of slots into account, and sum new rows apart. The numbers were measured on an H200; lowering
does not notice a tile that needs too much shared memory, so it is rejected here. Imports nothing of
the package.
"""

import dataclasses

import jax

HEAD_DIMS = (32, 64, 128, 256, 512)
MAX_ROWS = 256
MAX_POSITIONS = 16  # of a slot that decodes or verifies
WAY_OUT = "use plain JAX: impl='xla', of an engine's experts 'dense'"
# Shared memory that one program may use, in bytes, and the number of multiprocessors.
DEVICES = {
    "A100": (163 * 1024, 108),
    "H100": (227 * 1024, 132),
    "H200": (227 * 1024, 132),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tile:
    """How one program of a split-KV kernel works.

    Attributes:
      rows: query rows (group x positions) of one program, a power of two >= 16.
      block: keys of one step, a power of two >= 16.
      splits: programs that share one slot's keys; their partial results are combined.
      warps: warps of a program.
      stages: depth of the load pipeline; one stage computes, the others load.
      columns: output columns of one program, 0 for all. Fewer leave registers for more rows; every
        part of the columns computes the scores again.
    """

    rows: int
    block: int
    splits: int
    warps: int
    stages: int
    columns: int = 0

    def __post_init__(self):
        check_numbers(self, rows=16, block=16, warps=1)

    def shared_memory(self, head_dim: int, rotated: int = 0, itemsize: int = 2) -> int:
        """Bytes of shared memory of one program: query rows, weights and key and value blocks.

        `rotated` is the width of the rotated keys of the `v_rot` layout (0: keys in full). Hopper's
        64-row matrix instructions read a block while later ones load, so they hold one more, and
        take the weights from registers. On an A100 the block too many covers the weights.
        """
        keys, values = rotated or head_dim, self.columns or head_dim
        queries = self.rows * (head_dim + rotated)
        buffers = self.stages if self.rows >= 64 else max(1, self.stages - 1)
        blocks = buffers * self.block * (keys + values)
        if rotated and self.stages == 1:
            blocks += self.block * head_dim  # values enter both products, laid out differently
        weights = self.rows * self.block if self.rows < 64 else 0
        return itemsize * (queries + blocks + weights)


def check_numbers(tile, **least: int):
    """ValueError unless these fields are powers of two from `least` on, splits and stages >= 1."""
    for field, low in least.items():
        value = getattr(tile, field)
        if value < low or value & (value - 1):
            raise ValueError(f"tile.{field}={value} must be a power of two >= {low}")
    if tile.splits < 1 or tile.stages < 1:
        raise ValueError(f"tile needs splits and stages >= 1: {tile}")


def next_power_of_two(n: int) -> int:
    """The smallest power of two >= n."""
    return 1 << max(0, n - 1).bit_length()


def current_device() -> str:
    """Kind of the device that is traced for; a machine without a GPU stands in for an H200."""
    abstract = getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)
    if abstract is not None:
        return abstract.device_kind
    device = jax.devices()[0]
    return device.device_kind if device.platform in ("gpu", "cuda") else "NVIDIA H200"


def limits(device_kind: str) -> tuple[int, int]:
    """(shared memory of a program in bytes, multiprocessors) of a device kind."""
    for name, limit in DEVICES.items():
        if name in device_kind:
            return limit
    known = ", ".join(DEVICES)
    raise NotImplementedError(
        f"no tiles for device {device_kind!r}: tiles are known for {known}; {WAY_OUT}"
    )


def _fit(kernel, *, stages, head_dim, device, rotated=0, **tile) -> Tile:
    """The tile with the deepest load pipeline that fits the device's shared memory."""
    memory, _ = limits(device)
    for depth in range(stages, 0, -1):
        fitting = Tile(stages=depth, **tile)
        if fitting.shared_memory(head_dim, rotated) <= memory:
            return fitting
    raise NotImplementedError(
        f"{kernel}: {fitting.rows} rows x head_dim {head_dim} need "
        f"{fitting.shared_memory(head_dim, rotated)} bytes of shared memory; {device} has {memory}"
    )


def whole_rows(rows: int, most: int) -> int:
    """Rows of a tile for so many: a power of two that matrix instructions take, at most `most`."""
    return min(max(16, next_power_of_two(rows)), most)


def _warps(rows: int, head_dim: int) -> int:
    # A thread keeps rows x head_dim / (32 x warps) float32 sums: 128 of its 255 registers at most.
    return 8 if rows * head_dim > 32 * 512 else 4


def ring_tile(*, rows: int, head_dim: int, capacity: int, device: str) -> Tile:
    """Ring attention: one block of 64 slots a program, so that every load is in flight at once."""
    block = min(64, capacity & -capacity)
    tile_rows = whole_rows(rows, 64)
    return _fit(
        "ring_attention",
        rows=tile_rows,
        block=block,
        splits=min(capacity // block, 64),
        warps=_warps(tile_rows, head_dim),
        stages=1 if capacity // block <= 64 else 3,
        head_dim=head_dim,
        device=device,
    )


def shared_ring_tile(
    *, rows: int, head_dim: int, capacity: int, sets: int, appends: bool, device: str
) -> Tile:
    """Rings that share the device: `sets` is the slots x KV heads of a step.

    One block a program and one program for new rows, while two programs a multiprocessor run them
    all at once. Else a program takes several of these units and loads the next while it computes,
    one program a multiprocessor: 31B, 4 positions, 8 slots 43.5 us instead of 63.5, 1 slot 11.3
    instead of 12.4. The splits are those whose busiest multiprocessor has the least to do; what a
    program does besides its units takes as long as two of them.
    """
    shape = {"rows": rows, "head_dim": head_dim, "capacity": capacity, "device": device}
    tile, (_, multiprocessors) = ring_tile(**shape), limits(device)
    units = capacity // tile.block + appends
    if units * sets <= 2 * multiprocessors:
        return dataclasses.replace(tile, splits=units)

    def longest(splits: int) -> int:
        return -(-sets * splits // multiprocessors) * (-(-units // splits) + 2)

    fields = dataclasses.asdict(tile) | {"splits": min(range(1, units + 1), key=longest)}
    # Programs that do not all run at once: two a multiprocessor, each with half of the buffers.
    fields["stages"] = 3 if sets * fields["splits"] <= multiprocessors else 2
    return _fit("ring_attention", **fields, head_dim=head_dim, device=device)


def grouped_tile(
    *,
    rows: int,
    head_dim: int,
    kv_heads: int,
    rotated: int = 0,
    slots: int = 1,
    size: int = 0,
    device: str,
) -> Tile:
    """Grouped attention: as many splits as give every multiprocessor one program of one slot.

    Kernels that share the device among `slots` slots of `size` positions take fewer, down to one
    program a multiprocessor for all of them, but no program more than 1,024 keys while there are
    splits to be had: a slot may run alone, or be much longer than the others. Eight slots of 6,000
    keys of the 31B take 111 us with 8 splits, 126 with 33 and 107 with 4; 4 positions 132, 176 and
    121.

    Past 32 rows x 512 a program writes half of the columns, so that 64 rows fit its registers: with
    8 positions of the 31B 323 us at 131,005 keys, against 446 with two tiles of 32 rows and 463
    with 64 rows and all columns. `v_rot` stays with tiles of 32 rows.
    """
    is_wide = head_dim == 512 and rows > 32
    columns = 256 if is_wide and not rotated else 0
    tile_rows = whole_rows(rows, 32 if is_wide and rotated else 64)
    programs = kv_heads * -(-max(16, rows) // tile_rows) * (2 if columns else 1)
    alone = max(1, limits(device)[1] // programs)
    return _fit(
        "grouped_attention",
        rows=tile_rows,
        block=32,
        splits=min(alone, max(1, alone // slots, -(-size // 1024))) if slots > 1 else alone,
        warps=_warps(tile_rows, columns or head_dim),
        stages=3,
        columns=columns,
        head_dim=head_dim,
        rotated=rotated,
        device=device,
    )


def per_head_tile(*, rows: int, head_dim: int, device: str) -> Tile:
    """The per-head baseline: a program walks its head's whole context."""
    tile_rows = whole_rows(rows, 64)
    return _fit(
        "per_head_attention",
        rows=tile_rows,
        block=32,
        splits=1,
        warps=_warps(tile_rows, head_dim),
        stages=3,
        head_dim=head_dim,
        device=device,
    )


def prefill_tile(
    *, rows: int, head_dim: int, rotated: int = 0, capacity: int = 0, device: str
) -> Tile:
    """Prefill: as many rows as registers allow; a block divides the ring of `capacity` slots.

    Head dimension 512 in two halves of the columns, so that 128 rows fit: 2.64 ms for 2,048
    positions after 4,096, against 2.91 with 64 rows and 3.50 with 64 rows and all columns. `v_rot`
    reads all columns, and an A100 has no room for 128 rows: both stay with 64.
    """
    is_wide = head_dim == 512
    is_narrowed = is_wide and (rotated > 0 or limits(device)[0] < 200 * 1024)
    tile_rows = whole_rows(rows, 64 if is_narrowed else 128)
    block = 32 if is_wide else 64  # the best of a sweep
    columns = 256 if is_wide and tile_rows >= 64 and not rotated else 0
    return _fit(
        "prefill_attention",
        rows=tile_rows,
        block=min(block, capacity & -capacity) if capacity else block,
        splits=1,
        warps=_warps(tile_rows, columns or head_dim),
        stages=3,
        columns=columns,
        head_dim=head_dim,
        rotated=rotated,
        device=device,
    )
