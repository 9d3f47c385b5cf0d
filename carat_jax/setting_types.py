"""The typing rule of settings: text, Python values and YAML nodes become the type a key declares.

One rule serves YAML files, the command line and Python keywords. The key's declared type decides,
not YAML's guess: a value is converted where that loses nothing and has one reading (`1e-1` and
"0.1" are numbers, `no` is false for a flag and text for a string, `1e2` is a whole number), and is
otherwise refused in one line that names the key and the value. Imports nothing of carat_jax.
"""

import dataclasses
import difflib
import functools
import json
import math
import os
import re
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from decimal import Decimal
from typing import Any

import yaml

REFUSED = object()  # the `null` of a setting for which null means nothing


class Plain(str):
    """An unquoted scalar of YAML or of the command line: only such text can mean null."""

    __slots__ = ()


_TRUTH = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
# A leading zero is octal to some readers, so `010` has two readings and is not matched.
_INTEGER = re.compile(r"[-+]?(0|[1-9][0-9]*(_[0-9]+)*)(\.0*)?([eE][-+]?[0-9]{1,2})?")


def is_null(value: Any) -> bool:
    """Whether a value says "nothing": None, or one of its unquoted spellings."""
    return value is None or (
        isinstance(value, Plain) and value.lower() in ("", "~", "null", "none")
    )


def to_bool(value: Any) -> bool:
    """True or false from a boolean or one of its YAML spellings; never from a number."""
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.lower() in _TRUTH:
        return _TRUTH[value.lower()]
    raise ValueError("is not true or false")


def _to_int(value: Any) -> int:
    if isinstance(value, str) and _INTEGER.fullmatch(value):
        numerator, divisor = Decimal(value).as_integer_ratio()
        value = numerator if divisor == 1 else value
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    raise ValueError("is not a whole number")


def _to_float(value: Any) -> float:
    if isinstance(value, str) and value.lower().lstrip("+-") in (".inf", ".nan"):
        value = value.replace(".", "")  # YAML's spelling; the limits then judge the number
    if isinstance(value, str | int | float) and not isinstance(value, bool):
        try:
            return float(value)
        except (ValueError, OverflowError):
            pass
    raise ValueError("is not a number")


def _to_str(value: Any) -> str:
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    if isinstance(value, str) and not is_null(value):
        return str(value)
    raise ValueError("is not a string")


_SCALARS = {bool: to_bool, int: _to_int, float: _to_float, str: _to_str}


def _to_tuple(kinds: tuple, value: Any) -> tuple:
    """A list; a single scalar is a list of one, and null or "" is the empty list."""
    if is_null(value) or (isinstance(value, str) and not value):
        return ()
    if isinstance(value, Mapping):
        value = list(value.items())
    if isinstance(value, str | int | float):
        value = [value]
    if not isinstance(value, list | tuple):
        raise ValueError("is not a list")
    if kinds[-1] is Ellipsis:
        kinds = (kinds[0],) * len(value)
    elif len(value) != len(kinds):
        raise ValueError(f"has an entry that is not {len(kinds)} values")
    return tuple(convert(kind, item) for kind, item in zip(kinds, value, strict=True))


def convert(kind: Any, value: Any) -> Any:
    """`value` as the annotated type `kind`, or a ValueError that completes "<value> ..."."""
    if hasattr(value, "tolist"):  # scalars and arrays of numpy and jax
        value = value.tolist()
    kinds = typing.get_args(kind)
    match typing.get_origin(kind):
        case types.UnionType | typing.Union:
            if is_null(value):
                return None
            (kind,) = (k for k in kinds if k is not types.NoneType)
            return convert(kind, value)
        case typing.Literal:
            named = {str(k): k for k in kinds}
            if isinstance(value, bool) or str(value) not in named:
                raise ValueError(f"is not one of {', '.join(named)}")
            return named[str(value)]
        case origin if origin is tuple:
            return _to_tuple(kinds, value)
    return _SCALARS[kind](value)


@dataclasses.dataclass(frozen=True)
class Key:
    """One settable key: its dotted name, declared type, default and limits."""

    name: str
    kind: Any
    default: Any
    words: str
    allows: Callable | None
    null: Any

    def check(self, value: Any, where: str = "") -> Any:
        """The value in its declared type; ValueError in one line that starts with `where`."""
        prefix = f"{where}: {self.name}: {value!r}" if where else f"{self.name}: {value!r}"
        if is_null(value) and self.null is not REFUSED:
            return self.null
        must = f"; must be {self.words}" if self.words else ""
        try:
            found = convert(self.kind, value)
        except ValueError as error:
            raise ValueError(f"{prefix} {error}{must}") from None
        if found is not None and self.allows is not None and not self.allows(found):
            raise ValueError(f"{prefix} is not possible{must}")
        return found


def setting(
    default: Any, words: str = "", allows: Callable | None = None, null: Any = REFUSED
) -> Any:
    """A dataclass field with its limits as a predicate and in words, and what null stands for."""
    return dataclasses.field(
        default=default, metadata={"words": words, "allows": allows, "null": null}
    )


class Section:
    """Base of the setting dataclasses: converts and checks each field, whoever constructs it.

    Attributes:
      PREFIX: What precedes a field's name in its key, such as "sampling.".
    """

    PREFIX: typing.ClassVar[str] = ""

    def __post_init__(self) -> None:
        """Put every field into its declared type, or refuse it."""
        for name, key in self.keys().items():
            object.__setattr__(self, name, key.check(getattr(self, name)))

    @classmethod
    @functools.cache
    def keys(cls) -> dict[str, Key]:
        """The settable keys of this section by field name, without those of sections inside."""
        hints = typing.get_type_hints(cls)
        names = {f.name: cls.PREFIX + f.name for f in dataclasses.fields(cls) if f.metadata}
        return {
            f.name: Key(
                names[f.name],
                hints[f.name],
                f.default,
                **f.metadata,
            )
            for f in dataclasses.fields(cls)
            if f.name in names
        }


def unknown_key(key: str, value: Any, where: str, known: Iterable[str]) -> ValueError:
    """The refusal of a key that does not exist, with the nearest one that does."""
    last_of = {name: name.rpartition(".")[2] for name in known}
    head, _, last = key.rpartition(".")
    same = [name for name in last_of if last_of[name] == last]
    close = difflib.get_close_matches(key, last_of, n=1)
    close_last = difflib.get_close_matches(last, last_of.values(), n=1)
    close += [name for name in last_of if last_of[name] in close_last]
    if head in last_of:
        hint = f"{head} is one value; a model's facts come from its checkpoint and cannot be set"
    elif same or close:
        hint = f"did you mean {(same + close)[0]}?"
    else:
        inside = [name for name in last_of if name.startswith(f"{head}.")]
        hint = f"known keys: {', '.join(inside or dict.fromkeys(n.split('.')[0] for n in last_of))}"
    return ValueError(f"{where}{': ' if where else ''}{key}: {value!r}: unknown key; {hint}")


def from_node(node: yaml.Node, where: str, depth: int = 0) -> Any:
    """A YAML node as text, lists and dicts; what the text means is left to the key's type."""
    if depth > 10:
        raise ValueError(f"{where}: nested too deeply")
    if not node.tag.startswith("tag:yaml.org,2002:") or "python" in node.tag:
        raise ValueError(f"{where}: the tag {node.tag!r} is not supported")
    if isinstance(node, yaml.ScalarNode):
        return Plain(node.value) if node.style is None else node.value
    if isinstance(node, yaml.SequenceNode):
        return [from_node(item, where, depth + 1) for item in node.value]
    found = {}
    for key_node, value_node in node.value:
        key = from_node(key_node, where, depth + 1)
        if not isinstance(key, str) or key in found:
            raise ValueError(f"{where}: {key!r} is given twice or cannot be a key")
        found[key] = from_node(value_node, where, depth + 1)
    return found


def compose(text: str, where: str) -> yaml.Node | None:
    """The root node of a YAML text (None when it is empty), with errors in one line."""
    try:
        return yaml.compose(text, Loader=yaml.SafeLoader)
    except (yaml.YAMLError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        reason = getattr(error, "problem", None) or str(error).splitlines()[0]
        line = f":{mark.line + 1}" if mark else ""
        raise ValueError(f"{where}{line}: not valid YAML: {reason}") from None


def yaml_text(value: Any) -> str:
    """A value as YAML writes it in one line."""
    if isinstance(value, tuple):
        return f"[{', '.join(map(yaml_text, value))}]"
    if isinstance(value, str):
        style = {"default_style": '"', "allow_unicode": True, "width": math.inf}
        return yaml.safe_dump(value, **style).strip()
    return json.dumps(value)
