"""Every setting of the engine: its type, default and limits, and where its value came from.

Settings are nested frozen dataclasses that check themselves, so a `Config` that exists is valid and
can be a key or a static argument. `read_settings` gathers values from a YAML file, `key=value`
overrides and Python keywords, and checks them before anything is loaded; the checkpoint's own
sampling defaults are merged below them afterwards. What a model *is* (its sizes) is read from its
checkpoint and is never a setting.
"""

import dataclasses
import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from carat_jax.families import FAMILIES, is_size
from carat_jax.setting_sources import from_file, from_keywords, from_override
from carat_jax.setting_types import (
    REFUSED,
    Key,
    Section,
    setting,
    to_bool,
    unknown_key,
    yaml_text,
)

RANDOM_MODELS = tuple(FAMILIES)
# Settings that decide the weights; engines that differ in others alone can share them.
WEIGHT_KEYS = ("model", "dtype")
_INT32_MAX = 2**31 - 1  # what the steps on the device count in


def _between(low: float, high: float, default: float | None, null: Any = REFUSED) -> Any:
    return setting(default, f"from {low} to {high}", lambda x: low <= x <= high, null)


def _count(low: int, default: int | None, null: Any = REFUSED) -> Any:
    return _between(low, _INT32_MAX, default, null)


def _is_off_or_path(name: str) -> bool:
    return name == "off" or "/" in name


def _are_ids(ids: Iterable[int]) -> bool:
    return all(0 <= i <= _INT32_MAX for i in ids)


def _are_biases(pairs: Sequence[tuple[int, float]]) -> bool:
    ids = dict(pairs)
    return len(ids) == len(pairs) and _are_ids(ids) and all(abs(b) <= 1e9 for b in ids.values())


@dataclasses.dataclass(frozen=True)
class SamplingParams(Section):
    """How tokens are chosen, and when a sample ends.

    Attributes:
      temperature: Divides the logits; 0 takes the most likely token.
      top_k: Keep the k most likely tokens; 0 or null keeps all, as does a k past the vocabulary.
      top_p: Keep the fewest likeliest tokens that together reach top_p; 1 or null keeps all.
      min_p: Keep tokens at least min_p times as likely as the likeliest; 0 or null keeps all.
      repetition_penalty: Divides positive and multiplies negative logits of tokens already present
        in the prompt or the output; 1 (or null) is off.
      seed: Seed of the request, below 2**32; null draws a new one, which the result reports.
      max_tokens: Most tokens generated per sample; 0 generates none.
      n: Samples per prompt; the prompt is prefilled once.
      stop: Strings that end a sample; one string or a list.
      stop_token_ids: Token ids that end a sample, in addition to the checkpoint's own.
      include_stop: Whether the text keeps the stop string that ended it.
      ignore_eos: Whether to run past the checkpoint's end tokens (for benchmarks).
      logprobs: null for none; 0 for those of the chosen tokens; k for the k likeliest as well.
      logit_bias: Numbers added to the logits of tokens, `{id: bias}`; kept as sorted pairs.
    """

    PREFIX = "sampling."
    temperature: float = _between(0, 1_000_000, 1.0)
    top_k: int = _count(0, 0, null=0)
    top_p: float = setting(1.0, "above 0 and at most 1", lambda x: 0 < x <= 1, null=1.0)
    min_p: float = _between(0, 1, 0.0, null=0.0)
    repetition_penalty: float = _between(0.01, 100, 1.0, null=1.0)
    seed: int | None = _between(0, 2**32 - 1, None)
    max_tokens: int = _count(0, 256)
    n: int = _count(1, 1)
    stop: tuple[str, ...] = setting((), "strings that are not empty", all)
    stop_token_ids: tuple[int, ...] = setting((), "token ids, 0 or more", _are_ids)
    include_stop: bool = setting(False)
    ignore_eos: bool = setting(False)
    logprobs: int | None = _count(0, None)
    logit_bias: tuple[tuple[int, float], ...] = setting(
        (),
        "different token ids, 0 or more, each with a number from -1e9 to 1e9",
        _are_biases,
    )

    def __post_init__(self):
        super().__post_init__()
        object.__setattr__(self, "logit_bias", tuple(sorted(self.logit_bias)))


@dataclasses.dataclass(frozen=True)
class CacheConfig(Section):
    """How keys and values are kept.

    Attributes:
      local_layers: `ring` keeps a fixed ring of the last window; the baselines are `paged` (the
        window's pages, each slot found through a page table) and `full` (all of it, masked).
      global_layers: `kv` keeps keys and values; `v_rot` keeps values and only the rotated numbers
        of the keys, on the layers whose keys and values share one projection.
    """

    PREFIX = "cache."
    local_layers: Literal["ring", "paged", "full"] = setting("ring")
    global_layers: Literal["kv", "v_rot"] = setting("kv")


@dataclasses.dataclass(frozen=True)
class AttentionConfig(Section):
    """How attention is computed; each key changes speed, memory or rounding alone.

    Attributes:
      pad_keys: Key counts the three-stage path is compiled for: this one, doubled until it covers
        the context, the last cut to the context rounded up to a multiple of it. A step takes the
        first that holds its keys. `exact` compiles for every count.
      group_heads: Whether the query heads that share a KV head form one matrix.
      verify: One `fused` kernel, or `three_stage` (scores, softmax, values).
      fuse_rows: Whether the kernels take in the small operations around them: norms, RoPE, cache
        writes and residual sums of the new rows. Plain JAX has nothing to fuse them into, and
        `decode.uniform_rows` takes the separate operations.
      impl: `triton`, `xla` or `interpret`; null chooses by device and says what it chose.
    """

    PREFIX = "attention."
    pad_keys: Literal["exact", 64, 128, 256] = setting(64)
    group_heads: bool = setting(True)
    verify: Literal["fused", "three_stage"] = setting("fused")
    fuse_rows: bool = setting(True)
    impl: Literal["triton", "xla", "interpret"] | None = setting(None)


@dataclasses.dataclass(frozen=True)
class ProductsConfig(Section):
    """How rows are multiplied with the weights of attention and MLP; changes speed or rounding.

    Attributes:
      impl: `xla` leaves every product to XLA; `triton` or `interpret` is the Pallas kernel for
        those of at most 32 rows, the products of decode and verify. null is the kernel where it was
        measured to be no slower, on a GPU in bfloat16, and `xla` elsewhere.
    """

    PREFIX = "products."
    impl: Literal["triton", "xla", "interpret"] | None = setting(None)


@dataclasses.dataclass(frozen=True)
class MoeConfig(Section):
    """How the experts of a mixture are computed; changes speed, memory or rounding alone.

    Attributes:
      impl: `triton` or `interpret` is the Pallas kernel, which reads the chosen experts' weights
        only; `dense` computes every expert for every token; `ragged_dot` sorts tokens by expert for
        JAX's own product over groups. null is the kernel on a GPU in bfloat16, `dense` elsewhere.
    """

    PREFIX = "moe."
    impl: Literal["triton", "dense", "ragged_dot", "interpret"] | None = setting(None)


@dataclasses.dataclass(frozen=True)
class DecodeConfig(Section):
    """How tokens are proposed and verified.

    Attributes:
      drafter: Who proposes tokens: the MTP `assistant`, an `ngram` lookup, both `combined`, a
        smaller `model`, or `none`.
      draft_len: Tokens proposed per round; `auto` chooses, round by round, by measured acceptance
        and measured time, and proposes none where none pays.
      draft_model: Folder or hub name of the assistant or of the smaller model; null is the
        assistant that belongs to the target.
      sample_drafts: Draw the drafts of an assistant or a model instead of taking the best, and
        accept them by the ratio of both laws: the law of the output is exact, its ids may differ
        from those of plain decoding.
      uniform_rows: Rows per slot that decode and verify share in one executable, so that greedy
        output is bit for bit the same with and without drafts; 0 is off. No prefix is then reused.
      rounds_per_call: Rounds that one call of an executable runs before the host looks at their
        tokens, which then arrive that many at a time: for models whose step on the device is
        shorter than the host's part of it.
      simulate_acceptance: Tokens a round commits on average, at most one more than were drafted and
        whatever they are: to measure speed without trained weights. The text means nothing. null
        is off.
    """

    PREFIX = "decode."
    drafter: Literal["none", "assistant", "ngram", "combined", "model"] = setting("none")
    draft_len: Literal["auto", 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15] = setting(3)
    draft_model: str | None = setting(None)
    sample_drafts: bool = setting(False)
    uniform_rows: int = _between(0, 16, 0)
    rounds_per_call: int = _between(1, 64, 1)
    simulate_acceptance: float | None = _between(1, 16, None)

    def __post_init__(self):
        super().__post_init__()
        if self.rounds_per_call > 1 and self.uniform_rows:
            raise ValueError(
                f"decode.rounds_per_call: {self.rounds_per_call} rounds in one executable cannot "
                f"share their verify pass; use 1 with decode.uniform_rows={self.uniform_rows}"
            )


@dataclasses.dataclass(frozen=True)
class EngineConfig(Section):
    """What the engine reserves and compiles when it starts.

    Attributes:
      max_batch: Slots, that is, samples that run at once.
      max_context: Tokens of prompt and output a slot can hold; null is 8,192, or the model's own
        limit if that is less.
      prefill_chunks: Chunk lengths, in tokens, that prefill is compiled for.
      prefill_budget: Tokens prefilled, padding included, between two rounds of samples that run, so
        that a long prompt does not hold them up; null is the largest of `prefill_chunks`.
      reuse_prefix: Whether a prompt that begins with what a free slot still holds, such as the next
        turn of a conversation, continues from there.
      max_queue: Samples that may wait for a slot; more are refused.
      compile_cache: Folder of compiled steps, kept for later starts; null is `carat_jax/xla` in
        $XDG_CACHE_HOME or ~/.cache. `off` keeps none. JAX_COMPILATION_CACHE_DIR goes before it.
    """

    PREFIX = "engine."
    max_batch: int = _count(1, 4)
    max_context: int | None = _count(1, None)
    prefill_chunks: tuple[int, ...] = setting(
        (32, 128, 512),
        "a list of ascending whole numbers above 0",
        lambda sizes: sizes and sizes[0] > 0 and list(sizes) == sorted(set(sizes)),
    )
    prefill_budget: int | None = _count(1, None)
    reuse_prefix: bool = setting(True)
    max_queue: int = _count(0, 256)
    compile_cache: str | None = setting(None, "off, or a path with a /", _is_off_or_path)

    def __post_init__(self):
        super().__post_init__()
        if self.prefill_budget is not None and self.prefill_budget < self.prefill_chunks[0]:
            raise ValueError(
                f"engine.prefill_budget: {self.prefill_budget} does not hold the smallest of "
                f"engine.prefill_chunks, {self.prefill_chunks[0]}; raise it or add a smaller one"
            )


def _is_model_name(name: str) -> bool:
    return bool(name) and (not name.startswith("random:") or is_size(name[7:]))


@dataclasses.dataclass(frozen=True)
class Config(Section):
    """All settings of one engine.

    Attributes:
      model: `tiny` (embedded), a folder, a hub name, or `random:SIZE` (seeded random weights;
        `random:SIZE/LAYERS` has its first layers alone, for machines that hold no more).
      dtype: Type of weights, activations and caches.
      sampling: Defaults of every request.
    """

    model: str = setting(
        "tiny",
        f"a name, a folder or random:SIZE with SIZE one of {', '.join(RANDOM_MODELS)}; "
        "random:SIZE/LAYERS must end with a global layer",
        _is_model_name,
    )
    dtype: Literal["bfloat16", "float32"] = setting("bfloat16")
    sampling: SamplingParams = SamplingParams()
    cache: CacheConfig = CacheConfig()
    attention: AttentionConfig = AttentionConfig()
    products: ProductsConfig = ProductsConfig()
    moe: MoeConfig = MoeConfig()
    decode: DecodeConfig = DecodeConfig()
    engine: EngineConfig = EngineConfig()

    def __post_init__(self):
        super().__post_init__()
        for field in dataclasses.fields(self):
            if field.name not in self.keys() and type(getattr(self, field.name)) is not field.type:
                found = getattr(self, field.name)
                raise ValueError(f"{field.name}: {found!r} is not a {field.type.__name__}")


SECTIONS: dict[str, type[Section]] = {
    "sampling": SamplingParams,
    "cache": CacheConfig,
    "attention": AttentionConfig,
    "products": ProductsConfig,
    "moe": MoeConfig,
    "decode": DecodeConfig,
    "engine": EngineConfig,
}
KEYS: dict[str, Key] = {
    key.name: key for kind in (Config, *SECTIONS.values()) for key in kind.keys().values()
}


def sampling_from(base: SamplingParams, where: str = "", /, **overrides: Any) -> SamplingParams:
    """`base` with some fields replaced; an explicit 0, False, "" or None replaces too.

    `where` (such as "prompts.jsonl:3") starts the message of a refusal.
    """
    keys = SamplingParams.keys()
    for name in overrides:
        if name not in keys:
            raise unknown_key(name, overrides[name], where, keys)
    checked = {name: keys[name].check(value, where) for name, value in overrides.items()}
    return dataclasses.replace(base, **checked)


# ---- precedence ------------------------------------------------------------------------------

# The checkpoint's generation_config.json: its names for what are settings here.
_GENERATION_KEYS = {
    "temperature": "sampling.temperature",
    "top_k": "sampling.top_k",
    "top_p": "sampling.top_p",
    "min_p": "sampling.min_p",
    "repetition_penalty": "sampling.repetition_penalty",
    "max_new_tokens": "sampling.max_tokens",
    "stop_strings": "sampling.stop",
}


@dataclasses.dataclass(frozen=True)
class Settings:
    """The value and the origin of every key, before they become a `Config`.

    Attributes:
      given: Key -> (value, origin) from YAML, overrides and keywords, later sources replacing.
      generation: The same from the checkpoint's generation_config.json, which loses to `given`.
    """

    given: Mapping[str, tuple[Any, str]]
    generation: Mapping[str, tuple[Any, str]] = dataclasses.field(default_factory=dict)

    def with_generation_config(self, values: Mapping[str, Any], where: str) -> "Settings":
        """These settings over the checkpoint's own defaults; `where` names their file.

        Keys that are not sampling settings are not ours to read here, and null means "not stated".
        """
        found = {}
        for name, key in _GENERATION_KEYS.items():
            if values.get(name) is not None:
                found[key] = KEYS[key].check(values[name], where), where
        if values.get("do_sample") is not None:
            try:
                is_sampled = to_bool(values["do_sample"])
            except ValueError as error:
                message = f"{where}: do_sample: {values['do_sample']!r} {error}"
                raise ValueError(message) from None
            if not is_sampled:
                found["sampling.temperature"] = 0.0, f"{where} (do_sample: false)"
        return dataclasses.replace(self, generation=found)

    def items(self) -> Iterator[tuple[str, Any, str]]:
        """(key, value, origin) of every key there is, in the order of `Config`."""
        for name, key in KEYS.items():
            default = key.default, "built-in"
            yield name, *self.given.get(name, self.generation.get(name, default))

    def build(self) -> Config:
        """The configuration that these settings amount to."""
        sections: dict[str, dict] = {name: {} for name in ("", *SECTIONS)}
        for key, value, _ in self.items():
            section, _, name = key.rpartition(".")
            sections[section][name] = value
        built = {name: kind(**sections[name]) for name, kind in SECTIONS.items()}
        return Config(**sections[""], **built)

    def describe(self) -> str:
        """One line per key with its origin; the text is itself a valid YAML configuration."""
        lines = [(f"{key}: {yaml_text(value)}", origin) for key, value, origin in self.items()]
        width = max(len(line) for line, _ in lines)
        return "\n".join(f"{line:<{width}}  # {origin}" for line, origin in lines)


def read_settings(
    base: str | Path | Config | None = None,
    overrides: Sequence[str] = (),
    keywords: Mapping[str, Any] | None = None,
) -> Settings:
    """Settings from a YAML file, then `key=value` overrides, then Python keywords; later wins.

    Everything is checked here, before any checkpoint is opened; the checkpoint's own defaults are
    merged below these by `Settings.with_generation_config`.

    Args:
      base: The YAML file, or a `Config`, of which every key then counts as given.
      overrides: Texts such as "sampling.top_k=5"; of several for one key the last counts.
      keywords: Nested (`{"sampling": {"top_k": 5}}`), dotted, or with a section's dataclass.
    """
    if isinstance(base, Config):
        values = {name: functools.reduce(getattr, name.split("."), base) for name in KEYS}
        sources = [(name, value, "Config") for name, value in values.items()]
    else:
        sources = [] if base is None else list(from_file(base, SECTIONS))
    sources += [from_override(text) for text in overrides]
    sources += from_keywords(keywords or {}, SECTIONS)
    given = {}
    for name, value, where in sources:
        if name in SECTIONS:
            keys = ", ".join(SECTIONS[name].keys())
            raise ValueError(f"{where}: {name}: {value!r} is not a section; its keys are: {keys}")
        if name not in KEYS:
            raise unknown_key(name, value, where, KEYS)
        given[name] = KEYS[name].check(value, where), where
    return Settings(given)
