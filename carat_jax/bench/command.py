"""The command line that the benchmarks of a whole engine share: flags, refusals, the weights."""

import functools
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from absl import flags

import carat_jax
from carat_jax.bench.interrupt import leave
from carat_jax.config import WEIGHT_KEYS, read_settings


def new_flags(output: str) -> flags.FlagValues:
    """The flags that every such benchmark has; `output` says what --output is."""
    known = flags.FlagValues()
    own = {"flag_values": known}
    flags.DEFINE_string("config", None, "YAML settings.", **own)
    flags.DEFINE_multi_string("set", [], "key=value; repeatable.", **own)
    flags.DEFINE_string("output", None, output, **own)
    flags.DEFINE_string("commit", None, "Commit of the code, where there is no git.", **own)
    flags.DEFINE_boolean("help", False, "Print this.", **own)
    return known


_SMALL = ("engine.max_batch=1", "engine.max_context=256")


def load_weights(known: flags.FlagValues, rows: str | None = None) -> carat_jax.Engine:
    """The engine of --config and --set, to make variants of: its own caches are kept small.

    Weights are loaded once for all calls that agree on them, whatever else is set.

    Raises:
      ValueError: the file `rows` of --output has rows of another model, which one table cannot tell
        apart.
    """
    file = Path(known.output, rows) if known.output and rows else None
    if file and file.is_file():
        model = read_settings(known.config, known.set).build().model
        lines = file.read_text(encoding="utf-8").splitlines()
        if others := {json.loads(line).get("model", model) for line in lines} - {model}:
            raise ValueError(
                f"--output: {file} has rows of {min(others)}; give {model} a folder of its own"
            )
    fixed, others = [], []
    for text in known.set:
        (fixed if text.partition("=")[0] in WEIGHT_KEYS else others).append(text)
    return _load(known.config, tuple(fixed)).variant(**values_of([*others, *_SMALL]))


def values_of(texts: Sequence[str]) -> dict[str, Any]:
    """The values of `key=value` texts, by key, for `Engine.variant`."""
    return {name: value for name, (value, _) in read_settings(None, texts).given.items()}


@functools.lru_cache(maxsize=1)
def _load(config: str | None, settings: tuple[str, ...]) -> carat_jax.Engine:
    return carat_jax.load(read_settings(config, [*settings, *_SMALL]))


def whole_numbers(flag: str, texts: Sequence[str]) -> list[int]:
    """The values of a list flag.

    Raises:
      ValueError: one is not a whole number above 0, or there is none.
    """
    if not texts:
        raise ValueError(f"--{flag}: give one or more whole numbers above 0")
    if bad := [text for text in texts if not text.isdecimal() or int(text) < 1]:
        raise ValueError(f"--{flag}: {bad[0]!r} is not a whole number above 0")
    return [int(text) for text in texts]


def call(benchmark: ModuleType, arguments: Sequence[str]) -> int:
    """Runs the program of a benchmark's module with these arguments; what it returns."""
    known = benchmark._FLAGS
    known.unparse_flags()  # what an earlier call set
    known([benchmark.__name__, *arguments])
    return benchmark.main()


def run(program: Callable[[], int], known: flags.FlagValues, usage: str) -> None:
    """Parses the command line and exits with what the program returns.

    Bad input, which a `ValueError` tells of, is one line on stderr and exit code 2; a file that
    cannot be read or written is one, and exit code 1.
    """
    try:
        extra = known(sys.argv)[1:]
        if known.help:
            print(usage, known.get_help(), sep="\n")
            sys.exit(0)
        if extra:
            raise ValueError(f"{extra[0]!r} is not a flag; --help lists them")
        sys.exit(program())
    except (flags.Error, ValueError, NotImplementedError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except OSError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        leave()
