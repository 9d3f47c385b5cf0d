"""Where settings come from: YAML files, `key=value` texts and Python keywords, as one stream.

Each source yields (key, value, where), sections opened and keys dotted; what a value means is left
to the key's type, and whether a key exists to `config`. Imports `setting_types` alone.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from carat_jax.setting_types import Plain, Section, compose, from_node, is_null

# A dotted key, its value, and the file and line, or the flag, that it comes from.
Source = tuple[str, Any, str]
Sections = Mapping[str, type[Section]]


def _from_mapping(
    node: yaml.MappingNode, name: str, sections: Sections, prefix: str, seen: dict
) -> Iterator[Source]:
    """(key, value, where) of every value in a YAML mapping, sections opened."""
    for key_node, value_node in node.value:
        line = key_node.start_mark.line + 1
        where = f"{name}:{line}"
        key = f"{prefix}{from_node(key_node, where)}"
        if key in seen:
            raise ValueError(f"{where}: {key} is given twice, first in line {seen[key]}")
        seen[key] = line
        if key in sections and isinstance(value_node, yaml.MappingNode):
            yield from _from_mapping(value_node, name, sections, f"{key}.", seen)
        elif key not in sections or not is_null(from_node(value_node, where)):
            yield key, from_node(value_node, where), where


def read_yaml(path: str | Path) -> yaml.Node | None:
    """What a YAML file holds; None if that is nothing. ValueError names the file."""
    try:
        return compose(Path(path).read_text(encoding="utf-8-sig"), str(path))
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ValueError(f"{path}: is not UTF-8 text") from None


def from_file(path: str | Path, sections: Sections) -> Iterator[Source]:
    """What a YAML file says."""
    root = read_yaml(path)
    if root is None:
        return
    if not isinstance(root, yaml.MappingNode):
        raise ValueError(f"{path}:1: must hold `key: value` lines")
    yield from _from_mapping(root, str(path), sections, "", {})


def from_override(text: str) -> Source:
    """`key=value`: lists, maps and quoted text as in YAML, anything else is one plain scalar."""
    key, equals, value = (part.strip() for part in text.partition("="))
    if not equals or not key:
        raise ValueError(f"--set: {text!r} is not key=value")
    if value[:1] not in ("[", "{", '"', "'"):
        return key, Plain(value), "--set"
    where = f"--set: {key}"
    return key, from_node(compose(value, where), where), "--set"


def from_keywords(values: Mapping, sections: Sections, prefix: str = "") -> Iterator[Source]:
    """Python values, `{"sampling": {"top_k": 5}}` or `{"sampling.top_k": 5}`, or whole sections."""
    for name, value in values.items():
        key = f"{prefix}{name}"
        if isinstance(value, Section):
            if type(value) is not sections.get(key):
                raise ValueError(f"keyword: {key}: {value!r} does not belong here")
            value = dataclasses.asdict(value)
        if key in sections and isinstance(value, Mapping):
            yield from from_keywords(value, sections, f"{key}.")
        else:
            yield key, value, "keyword"
