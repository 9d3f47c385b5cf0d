"""What an ablation runs: a YAML file of a base and the overrides that are tried on it.

    title: Rings instead of page tables
    base: {model: tiny, engine.max_batch: 1}      # settings, nested or dotted
    variants:
      - cache.local_layers: [paged, full]         # a list is a grid: one variant for each value
      - {decode.drafter: ngram, decode.draft_len: [1, 3]}
    workload: {cpu: {new_tokens: 48}}             # optional; also gpu, prompt_tokens, rounds

Everything is checked here, before anything is loaded: a misspelt key is refused with its line and
the nearest key there is. Imports `config` and what it reads settings with alone.
"""

import dataclasses
import hashlib
import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from carat_jax.config import KEYS, SECTIONS, WEIGHT_KEYS, Settings, read_settings
from carat_jax.setting_sources import from_keywords, read_yaml
from carat_jax.setting_types import convert, from_node, unknown_key

_PARTS = ("title", "base", "variants", "workload")


@dataclasses.dataclass(frozen=True)
class Workload:
    """What every variant is timed on.

    Attributes:
      prompt_tokens: ids of each prompt.
      new_tokens: ids generated after it, end tokens ignored.
      rounds: timed repetitions, of which the median is taken.
      logprobs: the timed steps report log-probabilities too (0 or 1), as the exactness check does,
        which spares a second compilation of each.
    """

    prompt_tokens: int
    new_tokens: int
    rounds: int
    logprobs: int


WORKLOADS = {"cpu": Workload(192, 48, 5, logprobs=1), "gpu": Workload(6000, 128, 5, logprobs=0)}
_LEAST = {"prompt_tokens": 1, "new_tokens": 2, "rounds": 1, "logprobs": 0}
_ROOM = 64  # positions above prompt and output: a round may write past the last token


@dataclasses.dataclass(frozen=True)
class Variant:
    """One row of the table: the overrides, and all the settings they amount to."""

    name: str
    overrides: Mapping[str, Any]
    settings: Settings

    def key(self, *more: Any) -> str:
        """A short hash of every setting and of `more`: rows of one key are the same measurement."""
        values = {name: value for name, value, _ in self.settings.items()}
        text = json.dumps([values, *more], sort_keys=True, default=dataclasses.asdict)
        return hashlib.sha256(text.encode()).hexdigest()[:12]


@dataclasses.dataclass(frozen=True)
class Plan:
    """A checked ablation file; the first of `variants` is the base itself."""

    name: str
    title: str
    variants: tuple[Variant, ...]
    workload: Workload

    @property
    def base(self) -> Variant:
        """What the others are held against."""
        return self.variants[0]


def read_plan(
    path: str | Path, overrides: Sequence[str], backend: str, workload: Mapping[str, int]
) -> Plan:
    """Reads an ablation file.

    Args:
      path: the YAML file.
      overrides: `key=value` texts that replace settings of the base.
      backend: "cpu" or "gpu": which workload.
      workload: numbers that replace those of the file.

    Raises:
      ValueError: anything in it cannot be used; one line that starts with the file.
    """
    root = read_yaml(path)
    if not isinstance(root, yaml.MappingNode):
        raise ValueError(f"{path}:1: must hold `base:` and `variants:`")
    parts: dict[str, yaml.Node] = {}
    for key_node, node in root.value:
        where = f"{path}:{key_node.start_mark.line + 1}"
        key = from_node(key_node, where)
        if key not in _PARTS:
            raise unknown_key(key, from_node(node, where), where, _PARTS)
        if key in parts:
            raise ValueError(f"{where}: {key}: is given twice")
        parts[key] = node
    if not isinstance(parts.get("variants"), yaml.SequenceNode):
        raise ValueError(f"{path}: variants: must be a list of overrides, `- key: value`")
    if not parts["variants"].value:
        raise ValueError(f"{path}: variants: is empty; give at least one `- key: value`")
    chosen = _workload(parts.get("workload"), path, backend)
    chosen |= {key: _number(key, value, "workload") for key, value in workload.items()}
    base = _base(parts.get("base"), path, overrides, Workload(**chosen))
    tried = [item for node in parts["variants"].value for item in _grid(node, path)]
    names = _names(tried)
    variants = [Variant("base", {}, base)]
    for name, values in zip(names, tried, strict=True):
        settings = dataclasses.replace(base, given={**base.given, **values})
        variants.append(Variant(name, {key: value for key, (value, _) in values.items()}, settings))
    # A grid may pass through the base, or meet another grid: each setting is measured once.
    unique = {variant.key(): variant for variant in reversed(variants)}
    kept = tuple(variant for variant in variants if unique[variant.key()] is variant)
    title = str(from_node(parts["title"], str(path))) if "title" in parts else Path(path).stem
    return Plan(Path(path).stem, title, kept, Workload(**chosen))


def _base(node: yaml.Node | None, path: Any, overrides: Sequence[str], load: Workload) -> Settings:
    """The base's settings; the context is what the workload needs unless it is given."""
    values = {} if node is None else from_node(node, str(path))
    if not isinstance(values, Mapping):
        raise ValueError(f"{path}: base: must hold settings, `key: value`")
    given = {**_checked(values, f"{path}: base"), **read_settings(overrides=overrides).given}
    needed = -(-(load.prompt_tokens + load.new_tokens + _ROOM) // 64) * 64
    if given.get("engine.max_context", (None,))[0] is None:
        given["engine.max_context"] = needed, "workload"
    elif given["engine.max_context"][0] < needed - _ROOM:
        raise ValueError(
            f"{path}: engine.max_context: {given['engine.max_context'][0]} does not hold "
            f"{load.prompt_tokens} prompt and {load.new_tokens} new tokens"
        )
    # A prompt that is run again is prefilled again, and what compiles is compiled here and now.
    for key, value in (("engine.reuse_prefix", False), ("engine.compile_cache", "off")):
        given.setdefault(key, (value, "workload"))
    return Settings(given)


def _checked(values: Mapping, where: str) -> dict[str, tuple[Any, str]]:
    try:
        return dict(read_settings(keywords=values).given)
    except ValueError as error:
        raise ValueError(f"{where}: {str(error).removeprefix('keyword: ')}") from None


def _grid(node: yaml.Node, path: Any) -> list[dict[str, tuple[Any, str]]]:
    """The variants of one list item: every combination of the values it lists."""
    where = f"{path}:{node.start_mark.line + 1}"
    given, values = from_node(node, where), {}
    for key, value, _ in from_keywords(given, SECTIONS) if isinstance(given, Mapping) else ():
        if key in values:
            raise ValueError(f"{where}: {key}: is given twice")
        values[key] = value
    if not values:
        raise ValueError(f"{where}: {given!r} is not `key: value`")
    for key, value in values.items():
        if key not in KEYS:
            raise unknown_key(key, value, where, KEYS)
        if key in WEIGHT_KEYS:
            raise ValueError(f"{where}: {key}: variants share the weights of the base; use --set")
        if value == []:
            raise ValueError(f"{where}: {key}: an empty list is no variant; give a value")
    choices = [value if isinstance(value, list) else [value] for value in values.values()]
    combinations = itertools.product(*choices)
    return [_checked(dict(zip(values, found, strict=True)), where) for found in combinations]


def _names(tried: Sequence[Mapping]) -> list[str]:
    """`pad_keys=64`: the last part of each key where no other setting has the same."""
    last = [key.rpartition(".")[2] for key in KEYS]
    short = {k: n if last.count(n) == 1 else k for k, n in zip(KEYS, last, strict=True)}
    return [", ".join(f"{short[k]}={_word(v)}" for k, (v, _) in t.items()) for t in tried]


def _word(value: Any) -> str:
    return (
        "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    )


def _workload(node: yaml.Node | None, path: Any, backend: str) -> dict[str, int]:
    """The numbers for this backend: the built-in ones, replaced by the file's."""
    where = f"{path}: workload"
    found = {} if node is None else from_node(node, where)
    if not isinstance(found, Mapping):
        raise ValueError(f"{where}: must hold cpu: and gpu:")
    numbers = dataclasses.asdict(WORKLOADS[backend])
    for kind, values in found.items():
        if kind not in WORKLOADS:
            raise unknown_key(kind, values, where, WORKLOADS)
        if not isinstance(values, Mapping):
            raise ValueError(f"{where}: {kind}: must hold `key: value`")
        for key, value in values.items():
            if key not in numbers:
                raise unknown_key(key, value, f"{where}: {kind}", numbers)
            number = _number(key, value, f"{where}: {kind}")
            if kind == backend:
                numbers[key] = number
    return numbers


def _number(key: str, value: Any, where: str) -> int:
    try:
        number = convert(int, value)
    except ValueError as error:
        raise ValueError(f"{where}: {key}: {value!r} {error}") from None
    if number < _LEAST[key]:
        raise ValueError(f"{where}: {key}: {number} is too few")
    return number
