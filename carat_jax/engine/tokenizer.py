"""Text to token ids and back, from the files of a checkpoint folder.

Invariants: a prompt begins with exactly one BOS, whatever tokenizer.json, the template or the text
add; control tokens are parsed in raw prompts (the expert's interface) and never arise from the
content of chat messages; decoding one id at a time and all at once give the same text.

May import: the standard library, tokenizers, and `chat`.
"""

import codecs
import json
import re
import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from carat_jax.engine.chat import ChatTemplate, read_chat_templates

REPLACE_EACH_BYTE = "carat_jax.replace_each_byte"
# One U+FFFD for each invalid byte, as the `tokenizers` decoder writes them (Python's own handler
# writes one for a whole cut-off character).
codecs.register_error(REPLACE_EACH_BYTE, lambda e: ("\ufffd" * (e.end - e.start), e.end))

_SPACE = "\u2581"
_BYTE = re.compile("<0x([0-9A-Fa-f]{2})>")
_BRACKETED = re.compile(r"<\|[^<>|]+\|?>|<[^<>|]+\|>")
_DECODER = [
    {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
    {"type": "ByteFallback"},
    {"type": "Fuse"},
]
_TURN_ENDS = ("<turn|>", "<|tool_response>")
_MEDIA_KEYS = (
    "image_token_id", "boi_token_id", "eoi_token_id", "video_token_id",
    "audio_token_id", "boa_token_id", "eoa_token_id", "eoa_token_index",
)  # fmt: skip


class Tokenizer:
    """A Gemma tokenizer with its chat template and the ids that end or never enter an answer.

    Attributes:
        vocab_size: ids run from 0 to vocab_size - 1.
        bos_id: the first id of every prompt.
        eos_ids: ids that end an answer, ascending.
        suppress_ids: ids that must never be sampled, ascending.
        control_ids: ids that are not text: not shown by `decode`, not producible by chat content.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        bos_token: str = "<bos>",
        eos_token: str = "<eos>",
        chat_templates: Mapping[str, str] | None = None,
        generation_config: Mapping[str, Any] | None = None,
        config: Mapping[str, Any] | None = None,
    ):
        _check_decoder(backend)
        backend.no_truncation()  # a tokenizer.json can carry both, and would cut prompts silently
        backend.no_padding()
        self._backend = backend
        self._lock = threading.Lock()
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)
        self._bos_token, self._eos_token = bos_token, eos_token
        self.bos_id = self._required_id("bos_token", bos_token)

        control = {
            i: token.content
            for i, token in backend.get_added_tokens_decoder().items()
            if token.special or _BRACKETED.fullmatch(token.content)
        }
        control[self.bos_id] = bos_token
        self.control_ids = frozenset(control)
        # The unknown token arises from text without a spelling, not from text that spells it.
        self._unspeakable = self.control_ids - {self.token_id(backend.model.unk_token or "<unk>")}
        self._chat = ChatTemplate(chat_templates, control.values()) if chat_templates else None

        ends = [eos_token, *(_TURN_ENDS if chat_templates else ())]
        found = (self.token_id(text) for text in ends)
        self.eos_ids = end_token_ids(
            generation_config or {}, config or {}, [i for i in found if i is not None]
        )
        self.suppress_ids = tuple(
            i
            for i in suppressed_token_ids(generation_config or {}, config or {})
            if i < self.vocab_size  # cut-down vocabularies keep the ids of the full one
        )

    @classmethod
    def from_folder(cls, folder: str | Path) -> "Tokenizer":
        """Read tokenizer.json and, where present, the other files of a checkpoint folder.

        Raises:
            ValueError: tokenizer.json is missing, or one of the files is damaged.
        """
        folder = Path(folder)
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise ValueError(f"{path}: no such file; a checkpoint folder needs its tokenizer.json")
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise ValueError(f"{path}: not a readable tokenizer.json: {error}") from error
        settings = read_json(folder / "tokenizer_config.json")
        try:
            return cls(
                backend,
                bos_token=_token_text(settings, "bos_token", "<bos>"),
                eos_token=_token_text(settings, "eos_token", "<eos>"),
                chat_templates=read_chat_templates(folder, settings),
                generation_config=read_json(folder / "generation_config.json"),
                config=read_json(folder / "config.json"),
            )
        except ValueError as error:
            message = str(error)
            prefix = "" if message.startswith(str(folder)) else f"{folder}: "
            raise ValueError(prefix + message) from error

    def token_id(self, token: str) -> int | None:
        """The id of one token by its exact spelling, None if there is none."""
        return self._backend.token_to_id(token)

    def encode(self, text: str) -> list[int]:
        """Encode a raw prompt: one BOS, then the text, in which control tokens are parsed."""
        if not isinstance(text, str):
            raise ValueError(f"prompt: expected text, got {type(text).__name__}")
        return self._with_bos(self._ids(text))

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        thinking: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
    ) -> list[int]:
        """Encode a conversation; `content` can spell control tokens but not produce them.

        Args:
            messages: {role, content} with content a text or a list of {"type": "text", "text": ..}.
            thinking: the template's `enable_thinking`.
            tools: JSON schemas of the functions that the model may call.
            add_generation_prompt: end with the opening of the model's turn.
        """
        if self._chat is None:
            raise ValueError(
                "messages: this checkpoint has no chat template (a base model?); use a raw prompt"
            )
        runs = self._chat.render(
            messages,
            tools=tools,
            enable_thinking=thinking,
            add_generation_prompt=add_generation_prompt,
            bos_token=self._bos_token,
            eos_token=self._eos_token,
        )
        return self._with_bos([i for run in runs for i in self._ids(run.text, run.is_literal)])

    def token_bytes(self, token_id: int, skip_special: bool = True) -> bytes:
        """What one id adds to the answer, in UTF-8; b"" for a skipped or an unknown id."""
        token = self._backend.id_to_token(token_id)
        if token is None or (skip_special and token_id in self.control_ids):
            return b""
        if byte := _BYTE.fullmatch(token):
            return bytes.fromhex(byte[1])
        return token.replace(_SPACE, " ").encode()

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        """The text of `ids`: each invalid byte is one U+FFFD and leaves its neighbours whole."""
        pieces = (self.token_bytes(i, skip_special) for i in ids)
        return b"".join(pieces).decode("utf-8", REPLACE_EACH_BYTE)

    def _ids(self, text: str, is_literal: bool = False) -> list[int]:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(
                f"prompt: character {error.start} is half of a surrogate pair; it is not text"
            ) from error
        with self._lock:  # the switch is a state of the backend
            self._backend.encode_special_tokens = is_literal
            ids = self._backend.encode(text, add_special_tokens=False).ids
        if not is_literal or self._unspeakable.isdisjoint(ids):
            return ids
        # A control token that the file does not call special, or that merges happen to reach.
        spelled: list[int] = []
        for i in ids:
            if i in self._unspeakable:
                token = self._backend.id_to_token(i)
                spelled += self._ids(token[:1], True) + self._ids(token[1:], True)
            else:
                spelled.append(i)
        return spelled

    def _with_bos(self, ids: list[int]) -> list[int]:
        start = 0
        while start < len(ids) and ids[start] == self.bos_id:
            start += 1
        return [self.bos_id, *ids[start:]]

    def _required_id(self, field: str, token: str) -> int:
        token_id = self.token_id(token)
        if token_id is None:
            raise ValueError(f"{field}: {token!r} is not in the vocabulary of tokenizer.json")
        return token_id


def end_token_ids(
    generation_config: Mapping[str, Any], config: Mapping[str, Any], others: Iterable[int] = ()
) -> tuple[int, ...]:
    """All ids that end an answer: both files' `eos_token_id` joined, so that none gets lost.

    `others` are the ids that need no file to say so: the tokenizer's own EOS and, for a checkpoint
    with a chat template, the ends of a turn.
    """
    ids = set(others)
    for name, source in (
        ("generation_config.json", generation_config),
        ("config.json", config),
        ("config.json", config.get("text_config") or {}),
    ):
        ids.update(_id_list(name, source, "eos_token_id"))
    return tuple(sorted(ids))


def suppressed_token_ids(
    generation_config: Mapping[str, Any], config: Mapping[str, Any]
) -> tuple[int, ...]:
    """Ids that must never be sampled: `suppress_tokens`, and the placeholders of images and sound.

    A text engine can do nothing with a placeholder, and the 12B is known to emit some.
    """
    ids = set(_id_list("generation_config.json", generation_config, "suppress_tokens"))
    for key in _MEDIA_KEYS:
        ids.update(_id_list("config.json", config, key))
    return tuple(sorted(ids))


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; {} if there is no file, ValueError if it is something else."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path}: expected a JSON object, got {type(content).__name__}")
    return content


def _id_list(name: str, source: Mapping[str, Any], key: str) -> list[int]:
    value = source.get(key)
    values = [] if value is None else value if isinstance(value, list | tuple) else [value]
    for i in values:
        if type(i) is not int or i < 0:
            raise ValueError(f"{name}: {key}: expected an id or a list of ids, got {value!r}")
    return list(values)


def _token_text(settings: Mapping[str, Any], key: str, default: str) -> str:
    token = settings.get(key)
    if isinstance(token, Mapping):
        token = token.get("content")
    if token is None:
        return default
    if not isinstance(token, str):
        raise ValueError(f"tokenizer_config.json: {key}: expected a text, got {token!r}")
    return token


def _check_decoder(backend: tokenizers.Tokenizer) -> None:
    """Refuse tokenizers whose text is not what `token_bytes` says."""
    state = json.loads(backend.decoder.__getstate__()) if backend.decoder else {}
    if state.get("decoders") != _DECODER:
        raise ValueError(
            f"tokenizer.json: decoder: got {state or None}, expected Gemma's: "
            "Replace (U+2581 to space), ByteFallback, Fuse"
        )
