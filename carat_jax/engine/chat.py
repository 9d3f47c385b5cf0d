"""Chat messages to prompt text, through the checkpoint's own jinja template.

Invariant: whatever a message says, it cannot speak in control tokens. Before rendering, a mark that
occurs in no message is put behind the first character of everything that could begin a control
token; in the rendered text an unmarked control token is therefore the template's own. The result is
a list of runs, each to be encoded with control tokens parsed or taken literally.

May import: the standard library and jinja2.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment

ROLES = ("system", "developer", "user", "assistant", "model", "tool")
THOUGHT_OPEN, THOUGHT_CLOSE = "<|channel>", "<channel|>"
_THOUGHT = re.compile(re.escape(THOUGHT_OPEN) + "(.*?)" + re.escape(THOUGHT_CLOSE), re.DOTALL)
_PRIVATE_USE = range(0xE000, 0xF900)


class Run(NamedTuple):
    """A stretch of rendered text; `is_literal` says that its control tokens are only spelling."""

    text: str
    is_literal: bool


class ChatTemplate:
    """The named templates of one checkpoint ("default", and "tool_use" where there is one)."""

    def __init__(self, sources: Mapping[str, str], control_tokens: Iterable[str]):
        if "default" not in sources:
            raise ValueError(f"chat_template: no template named 'default' among {sorted(sources)}")
        # Longest first, because `<|image>` and `<|image|>` may share a beginning.
        control = sorted({token for token in control_tokens if token}, key=len, reverse=True)
        first = "".join(re.escape(char) for char in sorted({token[0] for token in control}))
        self._control = re.compile("|".join(map(re.escape, control)) or r"(?!)")
        self._first = re.compile(f"[{first}]" if first else r"(?!)")
        self._sources = dict(sources)
        self._templates = {name: _compile(name, source) for name, source in sources.items()}

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> list[Run]:
        """Render `messages`; `variables` (`enable_thinking`, `bos_token`, ...) go to the template.

        Raises:
            ValueError: messages of the wrong form, or a template that refuses them.
        """
        messages = check_messages(messages)
        tools = check_tools(tools)
        mark = self._unused_character([messages, tools, variables])

        def escape(text: str) -> str:
            return self._first.sub(lambda found: found[0] + mark, text)

        name = "tool_use" if tools and "tool_use" in self._templates else "default"
        try:
            text = self._templates[name].render(
                messages=[_escape_message(message, escape) for message in messages],
                tools=_map_text(escape, tools),
                **variables,
            )
        except Exception as error:  # a template is foreign code: any exception may come out of it
            reason = (str(error) or type(error).__name__).splitlines()[0]
            raise ValueError(f"the chat template refused the messages: {reason}") from error
        return self._runs(text, mark)

    def _runs(self, text: str, mark: str) -> list[Run]:
        """Cut out the pieces that spell a control token once their marks are gone.

        Everything else stays in as long runs as possible, so that ordinary messages are tokenised
        in one call, exactly as the rendered text would be.
        """
        runs, start = [], 0
        own = [found.span() for found in self._control.finditer(text)] + [(len(text), len(text))]
        piece_start = 0
        for own_start, own_end in own:
            piece = text[piece_start:own_start]
            if self._control.search(piece.replace(mark, "")):
                runs += [Run(text[start:piece_start], False), Run(piece, True)]
                start = own_start
            piece_start = own_end
        runs.append(Run(text[start:], False))
        runs = [Run(run.text.replace(mark, ""), run.is_literal) for run in runs]
        return [run for run in runs if run.text]

    def _unused_character(self, inputs: Any) -> str:
        used = set().union(*map(set, _texts(inputs)), *map(set, self._sources.values()))
        for code in _PRIVATE_USE:
            if chr(code) not in used:
                return chr(code)
        raise ValueError("messages: they use all 6400 private-use characters U+E000 to U+F8FF")


def read_chat_templates(folder: Path, settings: Mapping[str, Any]) -> dict[str, str]:
    """The templates of a checkpoint by name, {} if it has none.

    chat_template.jinja comes before tokenizer_config.json (`settings`), where `chat_template` is a
    text or a list of {name, template}.
    """
    file = folder / "chat_template.jinja"
    if file.is_file():
        return {"default": file.read_text(encoding="utf-8")}
    found = settings.get("chat_template")
    if found is None:
        return {}
    if isinstance(found, str):
        return {"default": found}
    try:
        return {str(entry["name"]): str(entry["template"]) for entry in found}
    except (TypeError, KeyError, IndexError) as error:
        raise ValueError(
            f"{folder / 'tokenizer_config.json'}: chat_template: expected a text or a list of "
            "{name, template}"
        ) from error


def check_messages(messages: Any) -> list[dict[str, Any]]:
    """Return `messages` as a list of new dicts with known roles, or raise a ValueError."""
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence):
        raise ValueError(
            f"messages: expected a list of {{role, content}}, got {type(messages).__name__}"
        )
    if not messages:
        raise ValueError("messages: the list is empty; give at least one {role, content}")
    return [_check_message(f"messages[{i}]", message) for i, message in enumerate(messages)]


def check_tools(tools: Any) -> list[dict[str, Any]] | None:
    """Return `tools` as a list of JSON schemas (None if there are none), or raise a ValueError."""
    if tools is None:
        return None
    if isinstance(tools, str | Mapping) or not isinstance(tools, Sequence):
        raise ValueError(f"tools: expected a list of JSON schemas, got {type(tools).__name__}")
    for i, tool in enumerate(tools):
        if not isinstance(tool, Mapping):
            raise ValueError(f"tools[{i}]: expected a JSON schema (dict), got {tool!r}")
    return [dict(tool) for tool in tools]


def _check_message(where: str, message: Any) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise ValueError(f"{where}: expected {{role, content}}, got {message!r}")
    role = message.get("role")
    if role not in ROLES:
        raise ValueError(f"{where}.role: got {role!r}; known roles: {', '.join(ROLES)}")
    content = message.get("content")
    if isinstance(content, list | tuple):
        for i, part in enumerate(content):
            _check_part(f"{where}.content[{i}]", part)
    elif not (isinstance(content, str) or (content is None and message.get("tool_calls"))):
        raise ValueError(f"{where}.content: expected text, got {content!r}")
    # Templates know the model's turns by the name "assistant" and write "model" themselves.
    return {**message, "role": "assistant" if role == "model" else role}


def _check_part(where: str, part: Any) -> None:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind in ("image", "image_url", "audio", "video"):
        raise ValueError(f"{where}: {kind!r} is not supported, only text is; leave this part out")
    if kind != "text" or not isinstance(part.get("text"), str):
        raise ValueError(f'{where}: expected {{"type": "text", "text": ...}}, got {part!r}')


def _escape_message(message: dict[str, Any], escape: Callable[[str], str]) -> dict[str, Any]:
    """Escape all text, but leave the borders of thoughts in the model's own turns.

    The template has to see them in order to strip the thoughts of earlier turns.
    """
    if message["role"] != "assistant":
        return _map_text(escape, message)

    def escape_around_thoughts(text: str) -> str:
        pieces = _THOUGHT.split(text)  # outside, thought, outside, ..., outside
        for i, piece in enumerate(pieces):
            escaped = escape(piece)
            pieces[i] = THOUGHT_OPEN + escaped + THOUGHT_CLOSE if i % 2 else escaped
        return "".join(pieces)

    return {
        key: _map_text(escape_around_thoughts if key == "content" else escape, value)
        for key, value in message.items()
    }


def _map_text(function: Callable[[str], str], value: Any) -> Any:
    """Apply `function` to every string, keys included, of a JSON-like value."""
    if isinstance(value, str):
        return function(value)
    if isinstance(value, Mapping):
        return {_map_text(function, k): _map_text(function, v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_map_text(function, item) for item in value]
    return value


def _texts(value: Any) -> Iterator[str]:
    texts: list[str] = []
    _map_text(lambda text: texts.append(text) or text, value)
    return iter(texts)


class _GenerationTag(Extension):
    """`{% generation %}` marks the model's words for training; here it only prints its body."""

    tags = frozenset({"generation"})

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(value: Any, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
    # jinja's own filter escapes HTML characters, which a prompt must not contain.
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _compile(name: str, source: str) -> jinja2.Template:
    """Compile in the environment that published templates expect (transformers defines it)."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_GenerationTag, "jinja2.ext.loopcontrols"],
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    try:
        return environment.from_string(source)
    except jinja2.TemplateSyntaxError as error:
        raise ValueError(f"chat_template {name!r}: line {error.lineno}: {error.message}") from error
