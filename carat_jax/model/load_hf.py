"""Loads the weights of a published checkpoint: safetensors, one file or an index and its shards.

Everything is checked on the files' headers before a byte is placed: every text tensor is used
exactly once, with its own shape and a type that needs no rounding, and all faults are reported
together. Then parameters are assembled on the host and placed one by one: bits arrive unchanged,
the host never holds more than two parameters, the device never more than the weights.
"""

import logging
import math
import os
import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding
from tqdm import tqdm

from carat_jax.model.json_file import read_json
from carat_jax.model.params import ParamSpec
from carat_jax.model.safetensors_file import StoredTensor, read_header

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
# As Google publishes them, as MLX exports name them, as transformers saves a text-only model, bare.
PREFIXES = ("model.language_model.", "language_model.model.", "model.", "")
_EMBEDDING = "embed_tokens.weight"
_TOWER = re.compile(
    r"(model\.)?(vision_tower|vision_embedder|embed_vision|audio_tower|embed_audio)\."
)
_HEAD = re.compile(r"(.*\.)?lm_head\.weight")
_BORROWED = ("k_proj.weight", "v_proj.weight", "k_norm.weight")
_BLOCK_ROWS, _BLOCK_BYTES = 32, 2**23
_log = logging.getLogger(__name__)

Placement = Callable[[ParamSpec], Sharding]


def load_hf(
    folder: Path,
    specs: Mapping[str, Any],
    *,
    is_tied: bool = True,
    allow_rounding: bool = False,
    placement: Placement | None = None,
) -> dict[str, Any]:
    """Reads a checkpoint folder into parameters shaped like `specs`.

    Args:
      folder: holds model.safetensors, or an index and the shards it names; other safetensors files
        in it are ignored.
      specs: nested dict of `ParamSpec`.
      is_tied: `tie_word_embeddings` of its config.json.
      allow_rounding: whether float32 tensors may become bfloat16 parameters.
      placement: where each parameter goes; the default device where absent.

    Raises:
      ValueError: the files are not exactly this model; all problems are listed.
    """
    started = time.monotonic()
    stored = check(folder, specs, is_tied=is_tied, allow_rounding=allow_rounding)
    leaves, tree = jax.tree.flatten(specs)
    total = sum(stored[source.name].num_bytes for spec in leaves for source in spec.tensors)
    placed: list[jax.Array] = []
    with (
        ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as pool,
        tqdm(
            total=total, desc=f"loading {folder.name}", unit="B", unit_scale=True, disable=None
        ) as bar,
    ):
        for spec in leaves:
            tensors = [stored[source.name] for source in spec.tensors]
            array = _assemble(spec, tensors, pool)
            placed.append(jax.device_put(array, placement and placement(spec)))
            # One parameter may be on its way to the device while the next is read, not more.
            jax.block_until_ready(placed[-2:-1])
            bar.update(sum(tensor.num_bytes for tensor in tensors))
    jax.block_until_ready(placed)
    seconds = time.monotonic() - started
    _log.info(
        "%s: read %.3f GB in %.1f s (%.2f GB/s)",
        *(folder, total / 1e9, seconds, total / 1e9 / max(seconds, 1e-9)),
    )
    return jax.tree.unflatten(tree, placed)


# ---- checks, on headers alone ----------------------------------------------------------------


def read_headers(folder: Path) -> tuple[dict[str, StoredTensor], list[str], set[str]]:
    """All tensors of a folder by full name, what is wrong with its files, and the index's names.

    The index decides which files count; a file that it does not name is never opened.
    """
    weight_map: dict[str, str] = {}
    if (folder / INDEX).is_file():
        weight_map = read_json(folder / INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not all(
            isinstance(file, str) and Path(file).name == file for file in weight_map.values()
        ):
            return {}, [f"{INDEX}: no weight_map from tensors to files of this folder"], set()
        files = sorted(set(weight_map.values()))
    else:
        files = [SINGLE]
        if not (folder / SINGLE).is_file():
            return {}, [f"no {SINGLE} and no {INDEX} in this folder"], set()
    tensors: dict[str, StoredTensor] = {}
    problems: list[str] = []
    for file in files:
        if not (folder / file).is_file():
            problems.append(f"{file}: missing; {INDEX} names it")
            continue
        found, faults = read_header(folder / file)
        problems += faults
        for name, tensor in found.items():
            if name in tensors:
                problems.append(f"{name}: both in {tensors[name].file.name} and in {file}")
            elif weight_map and weight_map.get(name) != file:
                place = weight_map.get(name, "no file")
                problems.append(f"{name}: in {file}, but {INDEX} says {place}")
            tensors[name] = tensor
        absent = [n for n, f in weight_map.items() if f == file and n not in found]
        if absent and (found or not faults):
            problems.append(f"{file}: lacks tensors that {INDEX} promises: {_list(absent)}")
    return tensors, problems, set(weight_map)


def text_prefix(names: Iterable[str]) -> str:
    """What stands before the text model's tensor names.

    Raises:
      ValueError: no known prefix fits, or more than one.
    """
    names = set(names)
    fitting = [prefix for prefix in PREFIXES if prefix + _EMBEDDING in names]
    if len(fitting) == 1:
        return fitting[0]
    if fitting:
        raise ValueError(f"two text models: {_list(prefix + _EMBEDDING for prefix in fitting)}")
    raise ValueError(
        f"no text model: none of {_list(prefix + _EMBEDDING for prefix in PREFIXES)} "
        f"among {len(names)} tensors"
    )


def stored_dtype(folder: Path) -> str:
    """The type that a checkpoint's embedding is stored in, as numpy names it."""
    tensors, problems, _ = read_headers(folder)
    try:
        dtype = tensors[text_prefix(tensors) + _EMBEDDING].dtype
    except ValueError as error:
        raise refusal(folder, problems or [str(error)]) from None
    return "float32" if dtype == "F32" else "bfloat16"


def check(
    folder: Path, specs: Mapping[str, Any], *, is_tied: bool = True, allow_rounding: bool = False
) -> dict[str, StoredTensor]:
    """The stored tensor of every source of `specs`, by the source's name, or one refusal.

    Reads headers alone, but for the bytes of an untied head; arguments as `load_hf`.
    """
    tensors, problems, promised = read_headers(folder)
    try:
        prefix = text_prefix(tensors)
    except ValueError as error:
        raise refusal(folder, problems or [str(error)]) from None
    wanted = {s.name: (s, spec) for spec in jax.tree.leaves(specs) for s in spec.tensors}
    full = {name: _full_name(prefix, name) for name in (*wanted, *_borrowed(wanted))}
    stored = {name: tensors[full[name]] for name in wanted if full[name] in tensors}
    heads = [name for name in tensors if _HEAD.fullmatch(name)]
    known = {*full.values(), *heads}
    unknown = [name for name in tensors if name not in known and not _TOWER.match(name)]
    # What the index promises and no file holds was reported with its file.
    missing = {full[name] for name in wanted if name not in stored} - promised
    if missing:
        problems.append(f"missing tensors: {_list(missing)}")
    if unknown:
        problems.append(f"unknown text tensors: {_list(unknown)}")
    for name, tensor in stored.items():
        if tensor.shape != wanted[name][0].shape:
            problems.append(f"{tensor.name}: shape {tensor.shape}, not {wanted[name][0].shape}")
    by_types = defaultdict(list)
    for name, tensor in stored.items():
        by_types[tensor.dtype, jnp.dtype(wanted[name][1].dtype).name].append(tensor.name)
    for (dtype, target), names in by_types.items():
        if fault := _type_fault(dtype, target, allow_rounding):
            problems.append(f"stored as {dtype}, {fault}: {_list(names)}")
    if not problems:
        problems = _head_problems([tensors[name] for name in heads], stored[_EMBEDDING], is_tied)
    if problems:
        raise refusal(folder, problems)
    return stored


def _full_name(prefix: str, name: str) -> str:
    """A tensor's name in the file; see `TensorSource.name`."""
    return name[1:] if name.startswith("/") else prefix + name


def _borrowed(wanted: Iterable[str]) -> list[str]:
    """Tensors that may be present for nothing: KV projections of layers that own no cache."""
    owners = {name.removesuffix(_BORROWED[0]) for name in wanted if name.endswith(_BORROWED[0])}
    queries = [name for name in wanted if name.endswith(".self_attn.q_proj.weight")]
    layers = [name.removesuffix("q_proj.weight") for name in queries]
    return [layer + part for layer in layers if layer not in owners for part in _BORROWED]


def _type_fault(stored: str, target: str, allow_rounding: bool) -> str | None:
    """Why a tensor of safetensors type `stored` cannot become a `target` parameter."""
    # Ids are published as int64 and stay far below 2^31.
    exact = {("BF16", "bfloat16"), ("F32", "float32"), ("BF16", "float32"), ("I64", "int32")}
    if (stored, target) in exact or (stored == "F32" and allow_rounding):
        return None
    if stored == "F32":
        return (
            f"which {target} would round (set dtype: float32, or convert the checkpoint with "
            f"--dtype {target})"
        )
    return "which is neither BF16 nor F32 (quantised and float16 checkpoints are not supported)"


def _head_problems(heads: list[StoredTensor], embedding: StoredTensor, is_tied: bool) -> list[str]:
    """The output head is the embedding. A head of its own must be the same, or be disowned."""
    differs = [head.name for head in heads if not _same_bytes(head, embedding)]
    if is_tied:
        if differs:
            _log.warning(
                "%s differs from the embedding; tie_word_embeddings is true, so the embedding is "
                "used",
                _list(differs),
            )
        return []
    if differs or not heads:
        what = f"has {_list(differs)}" if differs else "has no lm_head.weight"
        return [
            f"tie_word_embeddings is false and the checkpoint {what}; only a head equal to the "
            "embedding is supported"
        ]
    return []


def _same_bytes(a: StoredTensor, b: StoredTensor) -> bool:
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    first, second = (np.memmap(t.file, "u1", "r", t.start, (t.num_bytes,)) for t in (a, b))
    parts = [slice(i, i + _BLOCK_BYTES) for i in range(0, a.num_bytes, _BLOCK_BYTES)]
    return all(np.array_equal(first[part], second[part]) for part in parts)


def refusal(folder: Path, problems: list[str]) -> ValueError:
    """One error for all problems of a folder: a line for one, a list for several."""
    if len(problems) == 1:
        return ValueError(f"{folder}: {problems[0]}")
    lines = "".join(f"\n  {problem}" for problem in problems)
    return ValueError(f"{folder}: {len(problems)} problems:{lines}")


def _list(names: Iterable[str]) -> str:
    return ", ".join(sorted(names))


# ---- data ------------------------------------------------------------------------------------


def _assemble(spec: ParamSpec, tensors: list[StoredTensor], pool: Executor) -> np.ndarray:
    """One parameter in host memory, filled from the mapped files in blocks, by all threads.

    Transposing a big matrix in one go misses the cache with every element: blocks of a few rows do
    it three times faster, and faster than XLA does it on a CPU.
    """
    result = np.empty(spec.shape, jnp.dtype(spec.dtype))
    filled = sum(math.prod(source.shape) for source in spec.tensors)
    assert filled == result.size, f"{spec}: its tensors do not cover it"
    blocks = []
    for source, tensor in zip(spec.tensors, tensors, strict=True):
        stored = tensor.read().reshape(source.view or source.shape)
        target = result[source.index]
        if source.order:
            target = target.transpose(np.argsort(source.order))
            axis, size = source.order[-1], _BLOCK_ROWS
        else:
            axis, size = 0, max(1, _BLOCK_BYTES * stored.shape[0] // tensor.num_bytes)
        for start in range(0, stored.shape[axis], size):
            where = (slice(None),) * axis + (slice(start, start + size),)
            blocks.append((target[where], stored[where]))
    # The type was checked: this copies bits, widens exactly, or rounds because it was asked to.
    for _ in pool.map(lambda block: np.copyto(*block, casting="unsafe"), blocks):
        pass
    return result
