"""Tile choices of the products: a mixture's experts, and products of few rows.

As in `tiles`, a choice is a function of the shape and the device alone, and the numbers were
measured on an H200. Which products the kernels take at all is said here as well.
"""

import dataclasses

from pallas_kernels.tiles import DEVICES, check_numbers, limits, whole_rows

# Up to so many tokens a program looks for its expert's among all; of more, pairs are sorted first.
FEW_TOKENS = 64
# From so many tokens on an expert has enough of them for tiles of 128 rows.
LONG_CHUNK = 2048
MAX_FEW_ROWS = 32  # of a product that the kernels of few rows take


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProductTile:
    """How one program multiplies rows with a part of a weight.

    Attributes:
      rows: rows of one program, a power of two. From 16 on the product runs on matrix
        instructions; below it multiplies and sums number by number.
      columns: outputs of one program, a power of two that divides their number.
      block: inputs of one step, a power of two that divides their number.
      warps: warps of a program.
      stages: depth of the load pipeline.
      splits: programs that share the inputs, each of which leaves a part of the sum.
    """

    rows: int
    columns: int
    block: int
    warps: int
    stages: int
    splits: int = 1

    def __post_init__(self):
        check_numbers(self, rows=1, columns=16, block=16, warps=1)

    def check(self, kernel: str, inputs: int, outputs: int) -> None:
        """ValueError where the tile does not divide a product of these sizes."""
        if inputs % self.block or outputs % self.columns:
            raise ValueError(f"{kernel}: {self} does not divide {inputs} inputs, {outputs} outputs")

    def shared_memory(self, matrices: int, itemsize: int = 2) -> int:
        """Bytes of shared memory of one program that reads `matrices` matrices side by side."""
        buffers = self.stages if self.rows >= 64 else max(1, self.stages - 1)
        return itemsize * buffers * self.block * (self.rows + matrices * self.columns)


def expert_tiles(
    *, rows: int, hidden: int, width: int, device: str
) -> tuple[ProductTile, ProductTile]:
    """Tiles of the gate-up product and of the down product of `rows` tokens.

    Narrow tiles give every multiprocessor a program even when one token reads eight experts. Few
    rows, because few tokens share an expert: with tiles that hold all 64 tokens, four of which an
    expert has on average, a layer of the 26B takes 556 us instead of 373, with 32 rows 440. A long
    chunk has 128 or more pairs an expert: against tiles of 64 x 64, those of 128 x 128 take 753 us
    instead of 827 for 2,048 tokens and 1,720 instead of 2,033 for 6,144.
    """
    memory, _ = limits(device)
    if rows <= FEW_TOKENS:
        shared, columns = {"rows": 16, "block": 128, "warps": 4, "stages": 4}, (32, 64)
    elif rows < LONG_CHUNK:
        shared, columns = {"rows": 64, "block": 64, "warps": 4, "stages": 4}, (64, 64)
    else:
        shared, columns = {"rows": 128, "block": 64, "warps": 8, "stages": 3}, (64, 128)

    def fitted(matrices, wanted, inputs, outputs):
        shape = shared | {
            "columns": min(wanted, outputs & -outputs),
            "block": min(shared["block"], inputs & -inputs),
        }
        depths = range(shared["stages"], 0, -1)
        fitting = (ProductTile(**shape | {"stages": depth}) for depth in depths)
        return next(tile for tile in fitting if tile.shared_memory(matrices) <= memory)

    return fitted(2, columns[0], hidden, width), fitted(1, columns[1], width, hidden)


def few_row_tile(*, rows: int, inputs: int, outputs: int, device: str) -> ProductTile:
    """A product of few rows: 128 columns a program, and splits to give every multiprocessor one.

    The 31B's products of 32 rows against XLA's: q, k and v 48.1 us and 50.5, o 28.7 and 29.9, down
    62.2 and 66.6; of 4 rows they take as long. Narrower tiles and more splits were slower. Weights
    too small for 64 programs, half as many as multiprocessors, take narrower tiles.
    """
    _, multiprocessors = limits(device)
    block = min(128, inputs & -inputs)
    for most in (128, 64, 32, 16):
        columns = min(most, outputs & -outputs)
        splits = max(1, min(multiprocessors * columns // outputs, inputs // block, 8))
        if outputs // columns * splits >= 64:
            break
    return ProductTile(
        rows=whole_rows(rows, MAX_FEW_ROWS),
        columns=columns,
        block=block,
        warps=4,
        stages=min(3, -(-inputs // block // splits)),
        splits=splits,
    )


def few_rows_win(*, rows: int, inputs: int, outputs: int, device: str) -> bool:
    """Whether the kernel of few rows is no slower than XLA: a large weight of long columns.

    A verify pass of the 31B's 8 x 4 rows takes 18.68 ms with it and 19.29 without. XLA's product is
    the faster where columns are short or many: 113.5 us against 128.8 of the 31B's gate and up,
    58.8 and 60.5 of the 12B's, 26.2 and 28.2 of its global q, k and v; with E4B's gate and up by
    the kernel a step took 3.76 ms instead of 3.73, and with the assistant's, 16.8 M numbers, a
    draft 0.08 ms longer. Steps of at most 16 rows of the 31B take as long either way.
    """
    is_large = inputs * outputs >= 2**25 and inputs >= 2**12 and outputs <= 2**15
    return rows <= MAX_FEW_ROWS and is_large and _is_tiled(inputs, outputs, device)


def per_layer_rows_win(*, rows: int, inputs: int, outputs: int, device: str) -> bool:
    """The same of a per-layer input's gate and projection, whose cost is launches: up to four rows.

    A decode step of one slot takes 3.62 ms with the kernels and 3.71 without in E4B, 2.36 and 2.68
    in E2B, a verify pass of four rows 3.71 and 3.81, 2.35 and 2.42. Every program gates all rows:
    at eight rows E4B still gains 2 % and E2B loses 1, at 32 E2B loses 2.
    """
    return rows <= 4 and _is_tiled(inputs, outputs, device)


def _is_tiled(inputs: int, outputs: int, device: str) -> bool:
    """Whether there are tiles for a weight of these sides on this device."""
    return inputs % 16 == outputs % 16 == 0 and any(name in device for name in DEVICES)
