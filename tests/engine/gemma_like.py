"""A small tokenizer and chat template in Gemma 4's format, written for these tests."""

import json

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers
from tokenizers.processors import TemplateProcessing

CONTROL = [
    "<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "<|turn>", "<turn|>", "<|channel>", "<channel|>",
    "<|think|>", "<|tool>", "<tool|>", "<|tool_call>", "<tool_call|>", "<|tool_response>",
    "<tool_response|>", '<|"|>', "<|image|>",
]  # fmt: skip
MERGES = [
    ("t", "h"), ("th", "e"), ("▁", "the"), ("▁", "a"), ("o", "u"), ("th", "ou"), ("thou", "g"),
    ("thoug", "h"), ("though", "t"), ("x", "a"), ("c", "d"), ("\n", "\n"), ("▁", "▁"),
    ("i", "n"), ("日", "本"), ("▁", "h"), ("e", "r"), ("s", "t"), ("us", "er"), ("u", "s"),
]  # fmt: skip

TEMPLATE = """
{%- macro spoken(text) -%}
  {%- set kept = namespace(text='') -%}
  {%- for piece in text.split('<channel|>') -%}
    {%- set kept.text = kept.text ~ piece.split('<|channel>')[0] -%}
  {%- endfor -%}
  {{- kept.text | trim -}}
{%- endmacro -%}
{%- macro words(content, is_model) -%}
  {%- if content is string -%}
    {{- spoken(content) if is_model else content | trim -}}
  {%- elif content -%}
    {%- for part in content -%}{{- spoken(part.text) if is_model else part.text -}}{%- endfor -%}
  {%- endif -%}
{%- endmacro -%}
{{- bos_token -}}
{%- set system_first = messages[0].role in ['system', 'developer'] -%}
{%- if enable_thinking or tools or system_first -%}
  {{- '<|turn>system\\n' -}}
  {%- if enable_thinking -%}{{- '<|think|>\\n' -}}{%- endif -%}
  {%- if system_first -%}{{- words(messages[0].content, false) -}}{%- endif -%}
  {%- for tool in tools or [] -%}
    {{- '<|tool>declaration:' ~ tool.function.name ~ '{description:<|"|>' -}}
    {{- tool.function.description ~ '<|"|>}<tool|>' -}}
  {%- endfor -%}
  {{- '<turn|>\\n' -}}
{%- endif -%}
{%- for message in messages -%}
  {%- if loop.first and system_first -%}{%- continue -%}{%- endif -%}
  {%- if message.role == 'system' -%}
    {{- raise_exception('the system message must come first') -}}
  {%- endif -%}
  {%- set is_model = message.role == 'assistant' -%}
  {{- '<|turn>' ~ ('model' if is_model else message.role) ~ '\\n' -}}
  {{- words(message.content, is_model) -}}
  {%- for call in message.tool_calls or [] -%}
    {{- '<|tool_call>call:' ~ call.function.name ~ call.function.arguments | tojson -}}
    {{- '<tool_call|>' -}}
  {%- endfor -%}
  {{- '<turn|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
  {{- '<|turn>model\\n' -}}
  {%- if not enable_thinking -%}{{- '<|channel>thought\\n<channel|>' -}}{%- endif -%}
{%- endif -%}
"""


def build_backend(adds_bos: bool = False, unmarked: tuple[str, ...] = ()) -> Tokenizer:
    """BPE with byte fallback; `unmarked` control tokens are added without being called special."""
    texts = [*CONTROL, *(f"<0x{byte:02X}>" for byte in range(256))]
    texts += sorted({*"▁\n\ufffd日本", *map(chr, range(0x21, 0x7F))})
    texts += [first + second for first, second in MERGES]
    vocab = {text: i for i, text in enumerate(dict.fromkeys(texts))}
    backend = Tokenizer(
        models.BPE(vocab=vocab, merges=_ordered(MERGES), unk_token="<unk>", fuse_unk=True,
                   byte_fallback=True)
    )  # fmt: skip
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    for text in CONTROL:
        token = AddedToken(text, special=text not in unmarked, normalized=False)
        (backend.add_tokens if text in unmarked else backend.add_special_tokens)([token])
    if adds_bos:
        backend.post_processor = TemplateProcessing(
            single="<bos> $A", special_tokens=[("<bos>", vocab["<bos>"])]
        )
    return backend


def write_folder(
    folder,
    *,
    adds_bos=False,
    template=TEMPLATE,
    settings=None,
    generation_config=None,
    config=None,
):
    """Write a checkpoint folder without weights; None leaves a file out."""
    folder.mkdir(parents=True, exist_ok=True)
    build_backend(adds_bos).save(str(folder / "tokenizer.json"))
    for name, content in (
        ("tokenizer_config.json", settings),
        ("generation_config.json", generation_config),
        ("config.json", config),
    ):
        if content is not None:
            (folder / name).write_text(json.dumps(content))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return folder


def _ordered(merges):
    """A merge comes after those that make its parts."""
    return sorted(merges, key=lambda pair: len(pair[0] + pair[1]))
