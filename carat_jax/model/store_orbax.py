"""A converted checkpoint: Orbax arrays in the engine's own layout, and a manifest that seals them.

    FOLDER/manifest.json   format, every parameter's shape and type, size and SHA-256 of every file
    FOLDER/params/         the Orbax checkpoint
    FOLDER/*.json, *.jinja config, tokenizer and template, as they were published

A folder appears whole or not at all, and is restored only if every file is the one that was
written: Orbax itself reads a checkpoint with altered bytes, or with another model's shapes.
"""

import hashlib
import json
import logging
import math
import os
import shutil
import tempfile
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from tqdm import tqdm

from carat_jax.model.json_file import read_json
from carat_jax.model.load_hf import INDEX, Placement, refusal

MANIFEST, PARAMS = "manifest.json", "params"
FORMAT = "carat-jax-orbax-1"
_log = logging.getLogger(__name__)


def is_orbax(folder: Path) -> bool:
    """Whether a folder holds a converted checkpoint, whole or damaged."""
    return (folder / MANIFEST).is_file() or (folder / PARAMS / "_METADATA").is_file()


def check_free(folder: Path) -> None:
    """Refuses a folder that has something in it already."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder}: exists and is not an empty folder; nothing was written")


def save(folder: Path, params: Mapping[str, Any], source: Path) -> None:
    """Writes `params`, and the small files of the checkpoint `source`, into a new folder.

    Raises:
      ValueError: `folder` exists and is not empty.
    """
    check_free(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}."))
    try:
        for file in (*source.glob("*.json"), *source.glob("*.jinja")):
            if file.name not in (INDEX, MANIFEST):
                shutil.copyfile(file, partial / file.name)
        # Uncompressed: bfloat16 weights shrink by a fifth and load several times slower.
        handler = ocp.PyTreeCheckpointHandler(use_zarr3=True, use_compression=False)
        with ocp.Checkpointer(handler) as checkpointer:
            checkpointer.save(partial.absolute() / PARAMS, args=ocp.args.PyTreeSave(dict(params)))
        content = {"format": FORMAT, "params": _describe(params), "files": _hash_files(partial)}
        sealed = {"sha256": _seal(content), **content}
        (partial / MANIFEST).write_text(json.dumps(sealed, indent=1), encoding="utf-8")
        partial.chmod(0o755)  # a temporary folder starts out private
        os.replace(partial, folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def restore(
    folder: Path, specs: Mapping[str, Any], *, placement: Placement | None = None
) -> dict[str, Any]:
    """Reads a converted checkpoint into parameters shaped like `specs`.

    Raises:
      ValueError: a file is missing, added or altered, or the parameters are not those of `specs`;
        all problems are listed.
    """
    started = time.monotonic()
    stored = _check(folder, specs)
    default = jnp.zeros(()).sharding
    targets = jax.tree.map(
        lambda spec: jax.ShapeDtypeStruct(
            spec.shape, spec.dtype, sharding=placement(spec) if placement else default
        ),
        specs,
    )
    largest = max(math.prod(entry["shape"]) for entry in stored.values()) * 4
    handler = ocp.PyTreeCheckpointHandler(
        use_zarr3=True, restore_concurrent_gb=max(8, 2 * largest // 10**9)
    )
    with ocp.Checkpointer(handler) as checkpointer:
        params = checkpointer.restore(
            folder.absolute() / PARAMS,
            args=ocp.args.PyTreeRestore(
                item=targets, restore_args=ocp.checkpoint_utils.construct_restore_args(targets)
            ),
        )
    jax.block_until_ready(params)
    gigabytes = sum(leaf.nbytes for leaf in jax.tree.leaves(params)) / 1e9
    seconds = time.monotonic() - started
    _log.info(
        "%s: checked and read %.3f GB in %.1f s (%.2f GB/s)",
        *(folder, gigabytes, seconds, gigabytes / max(seconds, 1e-9)),
    )
    return params


def _check(folder: Path, specs: Mapping[str, Any]) -> dict[str, Any]:
    """The manifest's parameters, or one refusal that lists every difference."""
    if not (folder / MANIFEST).is_file():
        raise ValueError(f"{folder}: {MANIFEST} is missing; convert the checkpoint again")
    content = read_json(folder / MANIFEST)
    if content.get("format") != FORMAT:
        raise ValueError(
            f"{folder}: {MANIFEST} has format {content.get('format')!r}, this version reads "
            f"{FORMAT!r}; convert the checkpoint again"
        )
    if content.pop("sha256", None) != _seal(content):
        raise ValueError(f"{folder}: {MANIFEST} was altered; convert the checkpoint again")
    stored, wanted = content["params"], _describe(specs)
    found = _hash_files(folder)
    problems = [
        f"{name}: {'altered' if name in found else 'missing'}"
        for name, digest in content["files"].items()
        if found.get(name) != digest
    ]
    # Beside the parameters a user may keep notes; among them a stranger can change what is read.
    problems += [
        f"{name}: not in {MANIFEST}"
        for name in found
        if name.startswith(f"{PARAMS}/") and name not in content["files"]
    ]
    problems += [f"missing parameter: {name}" for name in wanted if name not in stored]
    problems += [f"unknown parameter: {name}" for name in stored if name not in wanted]
    for name in wanted.keys() & stored.keys():
        is_widened = (stored[name]["dtype"], wanted[name]["dtype"]) == ("bfloat16", "float32")
        if stored[name]["shape"] != wanted[name]["shape"]:
            problems.append(f"{name}: shape {stored[name]['shape']}, not {wanted[name]['shape']}")
        if stored[name]["dtype"] != wanted[name]["dtype"] and not is_widened:
            problems.append(
                f"{name}: stored as {stored[name]['dtype']}, which {wanted[name]['dtype']} would "
                "round (set dtype: float32, or convert again)"
            )
    if problems:
        raise refusal(folder, problems)
    return stored


def _describe(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Shape and type by dotted path, of arrays or of specs."""
    return {
        ".".join(str(key.key) for key in path): {
            "shape": list(leaf.shape),
            "dtype": jnp.dtype(leaf.dtype).name,
        }
        for path, leaf in jax.tree.leaves_with_path(tree)
    }


def _hash_files(folder: Path) -> dict[str, Any]:
    """Size and digest of every file but the manifest, by path."""
    files = [f for f in sorted(folder.rglob("*")) if f.is_file() and f != folder / MANIFEST]
    sizes = [file.stat().st_size for file in files]

    def digest(file: Path) -> str:
        with open(file, "rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()

    entries = {}
    with (
        ThreadPoolExecutor() as pool,
        tqdm(
            total=sum(sizes), desc=f"hashing {folder.name}", unit="B", unit_scale=True, disable=None
        ) as bar,
    ):
        for file, size, value in zip(files, sizes, pool.map(digest, files), strict=True):
            entries[file.relative_to(folder).as_posix()] = {"bytes": size, "sha256": value}
            bar.update(size)
    return entries


def _seal(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
