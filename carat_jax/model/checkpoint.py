"""Where a model's files are, and what its small files say.

`find_checkpoint` turns a name into a folder; `read_config` and `generation_config` read its JSON;
`load_params` reads its weights, whichever of the two formats they are in. Everything that a user
can get wrong is a ValueError with one clear line.
"""

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import huggingface_hub
from huggingface_hub import errors as hub_errors

from carat_jax import families
from carat_jax.model import store_orbax
from carat_jax.model.json_file import read_json
from carat_jax.model.load_hf import INDEX, SINGLE, Placement, check, load_hf

TINY = Path(__file__).parents[1] / "tiny"
_SMALL, _WEIGHTS = ("*.json", "*.jinja"), ("*.safetensors",)
_HUB_NAME = re.compile(r"\w[\w.-]*/\w[\w.-]*")


def find_checkpoint(model: str | Path, *, with_weights: bool = True, key: str = "model") -> Path:
    """The folder of a checkpoint: `tiny`, a folder, or a hub name (`owner/name`), fetched once.

    Args:
      model: the name.
      with_weights: False fetches the small files alone, which say what the model is.
      key: the setting that has the name, for refusals.

    Raises:
      ValueError: there is no such folder, or the hub cannot give it.
    """
    name = str(model)
    if name == "tiny":
        return TINY
    folder = Path(model).expanduser()
    if folder.is_dir():
        return folder
    if folder.exists():
        raise ValueError(f"{key}: {name} is a file; give the folder that holds its config.json")
    if not _HUB_NAME.fullmatch(name):
        raise ValueError(f"{key}: {name}: no such folder, and not a hub name (owner/name)")
    try:
        wanted = [*_SMALL, *(_WEIGHTS if with_weights else ())]
        return Path(huggingface_hub.snapshot_download(name, allow_patterns=wanted))
    except hub_errors.GatedRepoError as error:
        why = "its licence must be accepted on its page first, then `hf auth login`"
        raise ValueError(f"{key}: {name}: no access to this repository: {why}") from error
    except hub_errors.RepositoryNotFoundError as error:
        raise ValueError(
            f"{key}: {name}: no folder and no public repository of this name; check the spelling, "
            "or run `hf auth login` if it is private"
        ) from error
    # Which exceptions a broken network raises differs between versions of the hub's client.
    except Exception as error:
        ways = "go online or give a downloaded folder"
        if key == "model":
            ways = "go online, give a downloaded folder, or use model: tiny"
        raise ValueError(
            f"{key}: {name}: no folder of this name, not in the local cache, and not to be had "
            f"from the hub ({type(error).__name__}); {ways}"
        ) from error


def read_config(folder: Path) -> tuple[families.ModelConfig, dict[str, Any]]:
    """The model's facts, and config.json as it is.

    Raises:
      ValueError: there is no config.json, it is damaged, or describes a model that cannot be run.
    """
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise ValueError(f"{folder}: no config.json; is this the folder of a checkpoint?")
    raw = read_json(path)
    text = raw.get("text_config") or {}
    if not isinstance(text, dict):
        raise ValueError(f"{path}: text_config is not an object")
    for section in (raw, text):
        if found := section.get("quantization_config"):
            method = found.get("quant_method", "unnamed") if isinstance(found, dict) else found
            raise ValueError(
                f"{folder}: quantised by {method!r} (quantization_config); only bfloat16 and "
                "float32 checkpoints are supported"
            )
    try:
        config = families.from_hf(raw)
    except (TypeError, AttributeError, KeyError) as error:
        raise ValueError(f"{path}: a value is missing or has the wrong type: {error}") from error
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if field.type is int and type(value) is not int:
            raise ValueError(f"{path}: {field.name}: {value!r} is not a whole number")
    # The flag stands in both sections of a nested file; either can say that the head is separate.
    is_tied = all(section.get("tie_word_embeddings", True) for section in (raw, text))
    return dataclasses.replace(config, tie_word_embeddings=is_tied), raw


def generation_config(folder: Path) -> dict[str, Any]:
    """generation_config.json, or {} without one."""
    path = Path(folder) / "generation_config.json"
    return read_json(path) if path.is_file() else {}


def check_headers(folder: Path, specs: Mapping[str, Any]) -> None:
    """Compares `specs` with the headers of the safetensors files in `folder`, if it holds any.

    Raises:
      ValueError: the files are not exactly this model.
    """
    if (folder / SINGLE).is_file() or (folder / INDEX).is_file():
        check(folder, specs, is_tied=read_config(folder)[0].tie_word_embeddings)


def load_params(
    folder: Path,
    specs: Mapping[str, Any],
    *,
    is_tied: bool | None = None,
    placement: Placement | None = None,
) -> dict[str, Any]:
    """Weights shaped like `specs`, from a published checkpoint or from a converted one.

    Args:
      folder: what `find_checkpoint` gave.
      specs: nested dict of `ParamSpec`; their dtype is the type in memory.
      is_tied: whether the head is the embedding; None is what the model's config.json says.
      placement: where each parameter goes; the default device where absent.

    Raises:
      ValueError: the files are not exactly this model, or are damaged.
    """
    if store_orbax.is_orbax(folder):
        return store_orbax.restore(folder, specs, placement=placement)
    if is_tied is None:
        is_tied = read_config(folder)[0].tie_word_embeddings
    return load_hf(folder, specs, is_tied=is_tied, placement=placement)
