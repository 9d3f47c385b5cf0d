"""`tiny`'s tokenizer, and its corpus as rows of token ids.

A BPE with byte fallback as Gemma's: spaces become U+2581, any text can be written, control tokens
sit at the ids they have in the family. Merges are learned inside words only (on a corpus of
patterns they would swallow whole phrases), then the pre-tokenizer is dropped. Only the control
tokens are added tokens: bytes and unused ids are plain entries that no typed text can reach.
Imports neither JAX nor carat_jax, so that worker processes start fast.
"""

import functools
import json
import random
from pathlib import Path

import numpy as np
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.trainers import BpeTrainer

from tools.tiny_corpus import Writer, document

VOCAB_SIZE = 4096
CONTROL = {
    "<pad>": 0,
    "<eos>": 1,
    "<bos>": 2,
    "<unk>": 3,
    "<mask>": 4,
    "<|tool>": 46,
    "<tool|>": 47,
    "<|tool_call>": 48,
    "<tool_call|>": 49,
    "<|tool_response>": 50,
    "<tool_response|>": 51,
    '<|"|>': 52,
    "<|think|>": 98,
    "<|channel>": 100,
    "<channel|>": 101,
    "<|turn>": 105,
    "<turn|>": 106,
}
# Where the family's vocabulary keeps things that are no control tokens.
_NEWLINES, _SPACES, _BYTES, _FIRST_PIECE, _MAX_RUN = 107, 138, 238, 168, 31
_SPACE = "\u2581"


def chat_template(folder: Path):
    """The renderer of a model folder's chat template."""
    text = (folder / "chat_template.jinja").read_text(encoding="utf-8")
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(text).render


def build_tokenizer(folder: Path, seed: int, num_documents: int = 20_000) -> None:
    """Learns the merges from a sample of the corpus and writes tokenizer.json.

    Args:
      folder: the model folder; its chat template must be there.
      seed: of the sample.
      num_documents: size of the sample.
    """
    writer, render = Writer(random.Random(seed)), chat_template(folder)
    trainee = Tokenizer(models.BPE())
    trainee.normalizer = normalizers.Replace(" ", _SPACE)
    words = rf"{_SPACE}?\p{{L}}+|[^\p{{L}}]"
    trainee.pre_tokenizer = pre_tokenizers.Split(Regex(words), "isolated")
    alphabet = [_SPACE, *map(chr, range(33, 127))]
    reserved = _FIRST_PIECE + 256
    trainer = BpeTrainer(
        vocab_size=VOCAB_SIZE - reserved, initial_alphabet=alphabet, limit_alphabet=len(alphabet),
        show_progress=False,
    )  # fmt: skip
    trainee.train_from_iterator((document(writer, render) for _ in range(num_documents)), trainer)
    learned = json.loads(trainee.to_str())["model"]
    pieces = sorted(learned["vocab"], key=learned["vocab"].get)
    merges = [tuple(pair) for pair in learned["merges"]]
    tokenizer = _assemble(pieces, merges)
    tokenizer.save(str(folder / "tokenizer.json"))


def _assemble(pieces: list[str], merges: list[tuple[str, str]]) -> Tokenizer:
    ids = dict(CONTROL)
    for char, first, shortest in (("\n", _NEWLINES, 1), (_SPACE, _SPACES, 2)):
        runs = range(shortest, _MAX_RUN + 1)
        ids |= {char * length: first + length - shortest for length in runs}
        # Every split of every run: whatever the order of merging, a run ends as one token.
        merges = merges + [
            (char * left, char * (length - left))
            for length in range(2, _MAX_RUN + 1)
            for left in range(1, length)
        ]
    ids |= {f"<0x{byte:02X}>": _BYTES + byte for byte in range(256)}
    taken = set(ids.values())
    free = iter(i for i in range(_FIRST_PIECE, VOCAB_SIZE) if i not in taken)
    ids |= {piece: next(free) for piece in pieces if piece not in ids}
    unused = sorted(set(range(VOCAB_SIZE)) - set(ids.values()))
    ids |= {f"<unused{i}>": number for i, number in enumerate(unused)}
    tokenizer = Tokenizer(
        models.BPE(vocab=ids, merges=merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True)
    )
    tokenizer.normalizer = normalizers.Replace(" ", _SPACE)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in CONTROL])
    return tokenizer


@functools.cache
def _sources(folder: str):
    return Tokenizer.from_file(f"{folder}/tokenizer.json"), chat_template(Path(folder))


def token_rows(folder: str, seed: int, num_rows: int, length: int) -> np.ndarray:
    """Rows of documents, each row starting with a document and cut where it is full.

    Args:
      folder: the model folder, for tokenizer and chat template.
      seed: all chance comes from it.
      num_rows, length: shape of the result, uint16.
    """
    tokenizer, render = _sources(folder)
    writer, rows = Writer(random.Random(seed)), np.zeros((num_rows, length), np.uint16)
    for row in rows:
        filled = 0
        while filled < length:
            ids = tokenizer.encode(document(writer, render)).ids[: length - filled]
            row[filled : filled + len(ids)] = ids
            filled += len(ids)
    return rows
