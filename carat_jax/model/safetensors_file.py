"""The safetensors format: headers read and checked without touching the data, and raw bits.

A file is a little-endian u64 header length, a JSON header `{name: {dtype, shape, data_offsets}}`
and the tensors' bytes, which must fill the rest of the file without gap or overlap. The public
reader stops at the first fault and does not know bfloat16 in numpy; a checkpoint of many gigabytes
deserves the whole list of its faults before anything is placed. Imports nothing of carat_jax.
"""

import dataclasses
import json
import math
import struct
from pathlib import Path

import ml_dtypes
import numpy as np

ITEM_BYTES = {"BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1}
ITEM_BYTES |= {"I16": 2, "U16": 2, "F16": 2, "BF16": 2, "I32": 4, "U32": 4, "F32": 4}
ITEM_BYTES |= {"I64": 8, "U64": 8, "F64": 8, "C64": 8}
DTYPES = {"BF16": np.dtype(ml_dtypes.bfloat16), "F16": np.dtype("f2"), "F32": np.dtype("f4")}
DTYPES["I64"] = np.dtype("i8")
_MAX_HEADER = 100_000_000  # the format's own limit


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """Where one tensor lies: `start` and `end` count bytes from the beginning of `file`."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    start: int
    end: int

    @property
    def num_bytes(self) -> int:
        """Bytes it takes in the file."""
        return self.end - self.start

    def read(self) -> np.ndarray:
        """The tensor, mapped from the file and not copied; unmapped with the last reference."""
        kind = DTYPES[self.dtype]
        return np.memmap(self.file, kind, mode="r", offset=self.start, shape=self.shape)


def read_header(file: Path) -> tuple[dict[str, StoredTensor], list[str]]:
    """The tensors of one file by name, and everything that is wrong with the file.

    A tensor whose own entry is wrong is left out of the first and named in the second.
    """
    size = file.stat().st_size
    with open(file, "rb") as stream:
        start = stream.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else _MAX_HEADER + 1
        if length > _MAX_HEADER:
            return {}, [f"{file.name}: not a safetensors file, or cut off in its first bytes"]
        if 8 + length > size:
            return {}, [f"{file.name}: truncated in its header ({size} bytes)"]
        text = stream.read(length)
    try:
        entries = json.loads(text, object_pairs_hook=_unique)
        if not isinstance(entries, dict):
            raise ValueError("not a JSON object")
    except ValueError as error:
        return {}, [f"{file.name}: unreadable header: {error}"]
    tensors, problems = {}, []
    entries.pop("__metadata__", None)
    for name, entry in entries.items():
        try:
            tensors[name] = _parse(name, entry, file, 8 + length)
        except (ValueError, KeyError, TypeError) as error:
            problems.append(f"{file.name}: {name}: {error}")
    if not problems:
        problems = _layout_problems(tensors, file.name, 8 + length, size)
    return tensors, problems


def _unique(pairs: list[tuple]) -> dict:
    entries = dict(pairs)
    if len(entries) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{sorted({n for n in names if names.count(n) > 1})} appear twice")
    return entries


def _parse(name: str, entry: dict, file: Path, base: int) -> StoredTensor:
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise ValueError("its header entry must have dtype, shape and data_offsets")
    dtype, shape, (start, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
    if not all(type(n) is int and n >= 0 for n in (*shape, start, end)) or end < start:
        raise ValueError(f"bad shape {shape} or data_offsets [{start}, {end}]")
    # Types without a known width may exist in parts of a checkpoint that are never read.
    if dtype in ITEM_BYTES and end - start != math.prod(shape) * ITEM_BYTES[dtype]:
        raise ValueError(f"data_offsets [{start}, {end}] do not fit {dtype} of shape {shape}")
    return StoredTensor(name, dtype, shape, file, base + start, base + end)


def _layout_problems(
    tensors: dict[str, StoredTensor], file: str, base: int, size: int
) -> list[str]:
    """Gaps, overlaps, and data that the file lacks or has too much of."""
    problems, before, last = [], base, "the header"
    for tensor in sorted(tensors.values(), key=lambda t: (t.start, t.end)):
        if tensor.start != before:
            kind = "a gap" if tensor.start > before else "an overlap"
            problems.append(f"{file}: {kind} in data_offsets between {last} and {tensor.name}")
        before, last = max(before, tensor.end), tensor.name
    if before > size:
        cut = [t.name for t in tensors.values() if t.end > size]
        problems.append(
            f"{file}: truncated: {size} bytes of {before}; cut off: {', '.join(sorted(cut))}"
        )
    elif before < size:
        problems.append(f"{file}: {size - before} bytes past the last tensor")
    return problems
