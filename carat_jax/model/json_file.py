"""Reads the JSON files of a checkpoint folder. Imports nothing of carat_jax."""

import json
from pathlib import Path
from typing import Any


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
      ValueError: the file is damaged or holds something else; it is named.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: not readable as JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path}: an object was expected, not a {type(content).__name__}")
    return content
