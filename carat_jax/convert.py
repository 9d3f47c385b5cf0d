"""`python -m carat_jax.convert SRC DST`: a published checkpoint, converted for fast loading.

SRC is what `model:` takes: `tiny`, a folder, a hub name; or an assistant's, for
`decode.draft_model`. An assistant that lies in a folder of SRC is converted with it. DST must not
exist, or be empty; it then loads like any other folder. Exit code 0 when done, 2 for bad input,
with one message on stderr.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from absl import flags
from flax import nnx

from carat_jax.model import checkpoint, store_orbax
from carat_jax.model.assistant import ASSISTANT, Assistant, is_assistant, read_assistant_config
from carat_jax.model.gemma4 import Gemma4
from carat_jax.model.load_hf import load_hf, stored_dtype
from carat_jax.model.params import split

_USAGE = "usage: python -m carat_jax.convert SRC DST [--dtype bfloat16|float32]"
_FLAGS = flags.FlagValues()
_DTYPE = flags.DEFINE_enum(
    "dtype",
    None,
    ["bfloat16", "float32"],
    "type of the converted weights; the embedding's own by default",
    flag_values=_FLAGS,
)


def convert(source: str | Path, destination: str | Path, dtype: str | None = None) -> None:
    """Writes the checkpoint `source` to the folder `destination` in Orbax format.

    Raises:
      ValueError: the source cannot be loaded, or the destination is not free.
    """
    folder, destination = checkpoint.find_checkpoint(source), Path(destination).expanduser()
    store_orbax.check_free(destination)
    if store_orbax.is_orbax(folder):
        raise ValueError(f"{folder}: is a converted checkpoint already")
    module, is_tied = _declare(folder, dtype)
    params = load_hf(folder, split(module)[1], is_tied=is_tied, allow_rounding=dtype is not None)
    store_orbax.save(destination, params, folder)
    if (folder / ASSISTANT).is_dir():
        convert(folder / ASSISTANT, destination / ASSISTANT, dtype)


def _declare(folder: Path, dtype: str | None) -> tuple[nnx.Module, bool]:
    """The model or the assistant of a folder, and whether its head is the embedding."""
    if is_assistant(folder):
        config = read_assistant_config(folder)
        return Assistant(config, None, dtype or stored_dtype(folder)), True
    config, _ = checkpoint.read_config(folder)
    return Gemma4(config, dtype or stored_dtype(folder)), config.tie_word_embeddings


def main(argv: Sequence[str]) -> int:
    """Runs the command; returns its exit code."""
    if "--help" in argv:
        print(f"{__doc__}\n{_USAGE}")
        return 0
    try:
        arguments = _FLAGS(argv)[1:]
        if len(arguments) != 2:
            raise ValueError(f"{len(arguments)} arguments, not 2; {_USAGE}")
        convert(*arguments, dtype=_DTYPE.value)
    except flags.Error as error:
        print(f"convert: {error}; {_USAGE}", file=sys.stderr)
        return 2
    except (ValueError, NotImplementedError, OSError) as error:
        print(f"convert: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("convert: interrupted; nothing was written", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
