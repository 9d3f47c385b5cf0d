"""The Python API: `load(...)` gives an `Engine` that generates, streams, chats and scores.

import carat_jax
engine = carat_jax.load("tiny")
print(engine.generate("Once upon a time", max_tokens=60).text)
"""

import contextlib
import dataclasses
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from tqdm import tqdm

from carat_jax.config import (
    WEIGHT_KEYS,
    Config,
    SamplingParams,
    Settings,
    read_settings,
    sampling_from,
)
from carat_jax.decoding.sampling import LogitsHook
from carat_jax.engine.compile_cache import use_compile_cache
from carat_jax.engine.drafting import Drafting, open_drafter
from carat_jax.engine.engine import EngineLoop
from carat_jax.engine.feeding import Work, feed, raise_errors
from carat_jax.engine.memory import Blueprint, device_limit
from carat_jax.engine.request import Delta, Request, Result, TokenInfo
from carat_jax.engine.shapes import compute_options, size_text
from carat_jax.engine.tokenizer import Tokenizer
from carat_jax.engine.trace import Tracer, matching_names
from carat_jax.families import ModelConfig, named_size
from carat_jax.model import checkpoint
from carat_jax.model.gemma4 import Gemma4
from carat_jax.model.params import num_bytes, random_params, split
from carat_jax.numerics.options import compiler_options

# A prompt is text, or token ids that are used as they are.
Prompt = str | Sequence[int]
Messages = Sequence[Mapping[str, Any]]


# Seed of the weights of `random:SIZE`.
_RANDOM_SEED = 0
# Settings of `Engine.reference`.
_REFERENCE = {
    "dtype": "float32",
    "cache": {"local_layers": "ring", "global_layers": "kv"},
    "attention": {"impl": "xla", "verify": "fused", "group_heads": True},
    "decode": {
        "drafter": "none",
        "sample_drafts": False,
        "uniform_rows": 0,
        "simulate_acceptance": None,
    },
}


def load(
    model: str | Path | Config | Settings | None = None,
    *,
    logits_hook: LogitsHook | None = None,
    **settings: Any,
) -> "Engine":
    """Loads a model and makes an engine for it.

    Args:
      model: "tiny", a folder, a hub name, or "random:31b" and the like; or all settings at once, as
        a YAML file, a `Config` or `Settings`.
      logits_hook: a pure function of logits `[R, V]` and of the positions `[R]` of the tokens they
        are for; it becomes part of the compiled sampler.
      **settings: any setting, as a section (`engine={"max_batch": 8}`) or by its dotted name.

    Raises:
      ValueError: a setting, the checkpoint or a prompt of it cannot be used; one clear line.
    """
    if isinstance(model, Settings):
        if settings:
            raise ValueError("load: give settings either as Settings or as keywords, not both")
        wanted = model
    elif isinstance(model, Config) or str(model).endswith((".yaml", ".yml")):
        wanted = read_settings(model, keywords=settings)
    else:
        if model is not None:
            settings["model"] = str(model)
        wanted = read_settings(keywords=settings)
    return Engine(*_open(wanted, logits_hook), logits_hook)


def locate(settings: Settings) -> tuple[Path, ModelConfig, Settings]:
    """Finds what `settings.model` names: its folder, its facts, and the settings in effect.

    The checkpoint's generation_config.json is merged below `settings`; no weights are fetched.
    """
    name = settings.build().model
    if name.startswith("random:"):
        # Random weights have no vocabulary of their own: `tiny`'s ids drive a model of any size.
        return checkpoint.TINY, named_size(name.removeprefix("random:")), settings
    folder = checkpoint.find_checkpoint(name, with_weights=False)
    model, _ = checkpoint.read_config(folder)
    where = f"{folder / 'generation_config.json'}"
    merged = settings.with_generation_config(checkpoint.generation_config(folder), where)
    return folder, model, merged


@dataclasses.dataclass(frozen=True)
class Opened:
    """A model with its weights: what engines of different settings can share.

    `seconds` says how long each part of opening it took.
    """

    folder: Path
    model: ModelConfig
    graph: nnx.GraphDef
    params: Any
    tokenizer: Tokenizer
    seconds: Mapping[str, float] = dataclasses.field(default_factory=dict)


def draw(
    config: Config,
    model: ModelConfig,
    folder: Path,
    backend: str | None = None,
    hook: LogitsHook | None = None,
) -> tuple[nnx.GraphDef, Blueprint]:
    """The model's graph and the engine's blueprint, all checked, from small files alone.

    Args:
      config: all settings.
      model, folder: from `locate`.
      backend: "gpu" or "cpu" if it is not to run on this machine.
      hook: the user's function on the logits.

    Raises:
      ValueError: the drafter or the caches are not possible.
    """
    backend = backend or jax.default_backend()
    drafting = open_drafter(config, model, folder, compute_options(config, backend), hook)
    graph, specs = split(Gemma4(model, jnp.dtype(config.dtype)))
    return graph, Blueprint(config, model, specs, drafting, backend)


def _open(settings: Settings, hook: LogitsHook | None) -> tuple[Settings, Opened, Drafting]:
    """Finds and reads what `settings.model` names; its weights last, after all else is checked."""
    started = time.monotonic()
    folder, model, settings = locate(settings)
    config = settings.build()
    use_compile_cache(config.engine.compile_cache)
    tokenizer = Tokenizer.from_folder(folder)
    if tokenizer.vocab_size > model.vocab_size:
        raise ValueError(
            f"{folder}: tokenizer.json has {tokenizer.vocab_size} tokens, "
            f"the model's vocabulary is {model.vocab_size}"
        )
    graph, plan = draw(config, model, folder, hook=hook)
    plan.check_fits(device_limit())
    planned = time.monotonic()
    drafting, specs = plan.drafting.loaded(), plan.specs
    if config.model.startswith("random:"):
        params = random_params(specs, _RANDOM_SEED)
    else:
        params = checkpoint.load_params(checkpoint.find_checkpoint(config.model), specs)
    seconds = {"plan": planned - started, "weights": time.monotonic() - planned}
    return settings, Opened(folder, model, graph, params, tokenizer, seconds), drafting


class Engine:
    """A loaded model ready to serve; see `load`.

    Everything is served by one loop: a `generate` called while a `stream` is half read moves both.
    Sampling parameters are those of the settings, replaced by `sampling` if given, then by
    keywords. After a failed, interrupted or abandoned call the next one runs as on a fresh engine.
    One thread at a time: an engine has no locks.
    """

    def __init__(
        self,
        settings: Settings,
        opened: Opened,
        drafting: Drafting,
        hook: LogitsHook | None = None,
    ):
        self.settings, self._opened, self._hook = settings, opened, hook
        self.config, self.model, self.tokenizer = settings.build(), opened.model, opened.tokenizer
        self._tracer = Tracer(self.config, opened.model, opened.graph)
        self.loop = EngineLoop(
            self.config, self.model, opened.graph, opened.params, self.tokenizer, hook, drafting
        )

    def variant(self, **settings: Any) -> "Engine":
        """Another engine on the same weights: one idea toggled, `cache={"local_layers": "full"}`.

        Raises:
          ValueError: a setting cannot be used, or is one that would need other weights.
        """
        changed = read_settings(keywords=settings).given
        for key in WEIGHT_KEYS:
            if key in changed:
                raise ValueError(f"variant: {key} needs other weights; use load")
        given = {**self.settings.given, **changed}
        chosen, opened = dataclasses.replace(self.settings, given=given), self._opened
        config = chosen.build()
        use_compile_cache(config.engine.compile_cache)
        _, plan = draw(config, opened.model, opened.folder, hook=self._hook)
        plan.check_fits(device_limit(), held=num_bytes(plan.specs))
        return Engine(chosen, opened, plan.drafting.loaded(), self._hook)

    def reference(self) -> "Engine":
        """What others are held against: these weights widened to float32, plain JAX, no drafts.

        Raises:
          ValueError: a second copy of the weights does not fit the device.
        """
        given = self.settings.given | read_settings(keywords=_REFERENCE).given
        opened, settings = self._opened, dataclasses.replace(self.settings, given=given)
        graph, plan = draw(settings.build(), opened.model, opened.folder, hook=self._hook)
        plan.check_fits(device_limit())
        params = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), opened.params)
        exact = dataclasses.replace(opened, graph=graph, params=params)
        return Engine(settings, exact, plan.drafting, self._hook)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: SamplingParams | None = None,
        *,
        progress: bool = False,
        **overrides: Any,
    ) -> Result | list[Result]:
        """Completes one prompt, or several as a batch.

        Args:
          prompts: text or token ids, or a list of them. Text gets exactly one BOS; control tokens
            spelled in it count as such. Ids are used as they are.
          sampling: replaces the configured sampling parameters.
          progress: show a bar on a terminal.
          **overrides: single sampling parameters, e.g. `temperature=0, max_tokens=100, n=2`.

        Returns:
          A `Result`, or a list of them in the order of the prompts.

        Raises:
          LogitsError: (a FloatingPointError) a sample met logits that are NaN or leave no token.
            Everything else was finished first; the error's `results` hold it all.
        """
        params = self._params(sampling, overrides)
        prompts, is_single = _listed(prompts)
        results = self._run([(self._ids(prompt), params, False) for prompt in prompts], progress)
        return results[0] if is_single else results

    def stream(
        self,
        prompt: Prompt,
        sampling: SamplingParams | None = None,
        **overrides: Any,
    ) -> Iterator[Delta]:
        """Completes one prompt piece by piece; closing the iterator stops the work."""
        params = self._params(sampling, overrides)
        return self._stream(self._ids(prompt), params, is_chat=False)

    def chat(
        self,
        messages: Messages,
        sampling: SamplingParams | None = None,
        *,
        thinking: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **overrides: Any,
    ) -> Result:
        """Answers a conversation.

        Args:
          messages: `{"role": "user", "content": "..."}` and so on. Content cannot produce control
            tokens, whatever it spells.
          sampling: replaces the configured sampling parameters.
          thinking: let the model think first; the result's `thought` holds what it thought.
          tools: JSON schemas of functions the model may call.
          **overrides: single sampling parameters.
        """
        params = self._params(sampling, overrides)
        ids = self.tokenizer.encode_chat(messages, thinking=thinking, tools=tools)
        return self._run([(ids, params, True)])[0]

    def stream_chat(
        self,
        messages: Messages,
        sampling: SamplingParams | None = None,
        *,
        thinking: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **overrides: Any,
    ) -> Iterator[Delta]:
        """`chat` piece by piece: each delta has the `thought` and the `text` that became final."""
        params = self._params(sampling, overrides)
        ids = self.tokenizer.encode_chat(messages, thinking=thinking, tools=tools)
        return self._stream(ids, params, is_chat=True)

    def score(self, tokens: Prompt, num_top: int = 0) -> list[TokenInfo | None]:
        """The model's log-probability of each token given those before it; None for the first.

        Args:
          tokens: text (BOS is added) or token ids.
          num_top: also the most probable alternatives at each place.
        """
        return self.loop.score_ids(self._ids(tokens), num_top)

    def trace(
        self, prompt: Prompt, capture: str | Sequence[str] = "layers.*.residual"
    ) -> dict[str, np.ndarray]:
        """Arrays inside the model for one prompt, from an executable of their own.

        What is being served and its compiled steps are left as they are.

        Args:
          prompt: text (BOS is added) or token ids.
          capture: names, or patterns such as "layers.5.attn.scores" and "layers.*.residual"; see
            `trace_names`.

        Returns:
          Float32 arrays by name (ids int32): `[T, ...]`, one row a token; scores and probabilities
          `[N, T, T]` by query head, query and key.

        Raises:
          ValueError: a name that does not exist (the nearest is given), or too much to hold.
        """
        names, ids = matching_names(capture, self._tracer.names), self._ids(prompt)
        self.loop.limits.check_whole("trace", ids)
        return self._tracer.run(self._opened.params, ids, names)

    def trace_names(self) -> tuple[str, ...]:
        """What `trace` can capture; `model.taps.tap_names` says what each is."""
        return self._tracer.names

    def warm_up(self) -> None:
        """Compiles every step now instead of at its first use."""
        self.loop.warm_up()

    def describe(self) -> str:
        """What was chosen, in one line: device, implementations, caches, compiled shapes."""
        config, loop, stats = self.config, self.loop, self.stats()
        compute, drafter = loop.options.compute, loop.drafter.name
        options = "".join(f"; {name}={value}" for name, value in compiler_options().items())
        experts = f", experts {compute.experts}" if self.model.enable_moe_block else ""
        stages = "fused" if compute.is_fused else f"three stages over {loop.rungs or 'exact'} keys"
        if loop.options.simulate_acceptance is not None:
            drafter += " (acceptance is simulated: the text means nothing)"
        rows = (
            "" if compute.impl == "xla" else f", rows {'fused' if compute.fuse_rows else 'apart'}"
        )
        return (
            f"device: {stats['device']}; local layers: {config.cache.local_layers}, "
            f"global layers: {config.cache.global_layers}, {stages}, "
            f"{'grouped' if compute.group_heads else 'single'} heads, impl {compute.impl}{rows}"
            f", products {compute.products}{experts}; drafter: {drafter}; "
            f"{config.dtype} weights {size_text(stats['weight_bytes'])}, "
            f"caches {size_text(stats['cache_bytes'])} for {loop.num_slots} x {loop.max_context} "
            f"positions; prefill chunks {config.engine.prefill_chunks}, "
            f"rounds of {loop.num_rows} rows{options}"
        )

    def stats(self) -> dict[str, Any]:
        """Counters since the start, sizes in bytes, compilations, seconds that loading took."""
        return {**self.loop.stats(), "load_seconds": dict(self._opened.seconds)}

    def _params(self, sampling: SamplingParams | None, overrides: Mapping) -> SamplingParams:
        if not isinstance(sampling, SamplingParams | None):
            raise ValueError(
                f"sampling: {sampling!r} is not a SamplingParams; give single values as keywords"
            )
        return sampling_from(sampling or self.config.sampling, **overrides)

    def _ids(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt)
        ids = _items(prompt)
        if not all(map(_is_id, ids)):
            raise ValueError(f"prompt: {prompt!r} is neither text nor a list of token ids")
        return [int(i) for i in ids]

    def _run(self, jobs: Sequence[Work], progress: bool = False) -> list[Result]:
        for ids, params, _ in jobs:
            self.loop.limits.check(ids, params)
        requests: dict[int, Request] = {}
        running: dict[int, Request] = {}
        bar = tqdm(total=len(jobs), unit="prompt", disable=None if progress else True)
        with bar, contextlib.closing(feed(self.loop, jobs, running)) as steps:
            for _ in steps:
                requests |= running
                bar.update(sum(r.is_finished for r in running.values()))
        results = [requests[i].result() for i in range(len(jobs))]
        raise_errors(results)
        return results

    def _stream(self, ids: list[int], params: SamplingParams, is_chat: bool) -> Iterator[Delta]:
        if params.n != 1:
            raise ValueError(f"sampling.n: {params.n} samples cannot be streamed, only 1")
        deltas = self._follow(self.loop.submit(ids, params, is_chat))
        next(deltas)
        return deltas

    def _follow(self, request: Request) -> Iterator[Delta]:
        deltas = request.samples[0].deltas
        try:
            yield Delta("")  # for `_stream`: only a generator that has begun is closed when dropped
            while deltas or not request.is_finished:
                while not deltas:
                    self.loop.step()
                yield deltas.popleft()
            raise_errors([request.result()])
        finally:
            self.loop.cancel(request)


def _listed(prompts: Prompt | Sequence[Prompt]) -> tuple[list[Prompt], bool]:
    """The prompts as a list, and whether there was a single one: a text, or token ids."""
    if isinstance(prompts, str):
        return [prompts], True
    items = _items(prompts)
    return ([items], True) if items and _is_id(items[0]) else (items, False)


def _items(prompt: Iterable) -> list:
    """What a list, an array or an iterator holds; a list can be looked at twice."""
    items = prompt.tolist() if hasattr(prompt, "tolist") else prompt
    if not isinstance(items, Iterable) or isinstance(items, bytes | Mapping):
        raise ValueError(f"prompt: {prompt!r} is neither text nor a list of token ids")
    return list(items)


def _is_id(item: Any) -> bool:
    is_whole = hasattr(item, "__index__") and not isinstance(item, bool)
    return is_whole and not getattr(item, "ndim", 0)
