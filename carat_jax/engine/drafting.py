"""From the settings to a drafter: which one, what it declares, and its parameters.

`open_drafter` reads no weights: all that can be refused or counted is, before `Drafting.loaded`
reads them.
"""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
from flax import nnx

from carat_jax.assistant_families import ASSISTANTS
from carat_jax.config import Config
from carat_jax.decoding.drafters import (
    AssistantDrafter,
    CombinedDrafter,
    Drafter,
    ModelDrafter,
    NgramDrafter,
    NoDrafter,
)
from carat_jax.decoding.sampling import LogitsHook
from carat_jax.engine.draft_length import CHOICES
from carat_jax.families import ModelConfig
from carat_jax.model import checkpoint
from carat_jax.model.assistant import ASSISTANT, Assistant, declare_assistant, load_assistant
from carat_jax.model.gemma4 import Gemma4
from carat_jax.model.params import random_params, split
from carat_jax.numerics.options import ComputeOptions

_RANDOM = "random:"
_KEY = "decode.draft_model"  # what refusals name
# Seed of a random assistant's weights; the target's is another.
_SEED = 1


@dataclasses.dataclass(frozen=True)
class Drafting:
    """A drafter with what it needs at run time.

    Attributes:
      drafter: who proposes.
      params: its weights; () where it has none, or they are not loaded yet.
      specs: their declarations.
      read: makes `params`.
      model: the facts of a drafter that keeps caches of its own.
    """

    drafter: Drafter
    params: Any = ()
    specs: Any = ()
    read: Callable[[], Any] = tuple
    model: ModelConfig | None = None

    def loaded(self) -> "Drafting":
        """The same with its weights on the device."""
        return dataclasses.replace(self, params=self.read())


def longest_draft(config: Config) -> int:
    """The most drafts a round can have."""
    return CHOICES[-1] if config.decode.draft_len == "auto" else config.decode.draft_len


def open_drafter(
    config: Config,
    target: ModelConfig,
    target_folder: Path | None,
    options: ComputeOptions,
    hook: LogitsHook | None = None,
) -> Drafting:
    """Makes the drafter that `config.decode` names, without its weights.

    Args:
      config: all settings.
      target: the model it drafts for.
      target_folder: that model's folder; None for random weights.
      options: which implementations compute it.
      hook: the user's function on the logits.

    Raises:
      ValueError: there is no such drafter, or it does not fit the target.
    """
    kind, num_drafts = config.decode.drafter, longest_draft(config)
    if config.decode.simulate_acceptance is not None and kind == "none":
        raise ValueError(
            "decode.simulate_acceptance: there is nothing to accept without decode.drafter"
        )
    if config.decode.sample_drafts and kind not in ("assistant", "model"):
        raise ValueError(
            f"decode.sample_drafts: the drafts of {kind!r} are not drawn from a law; "
            "use decode.drafter: assistant or model, or false"
        )
    if config.decode.uniform_rows and config.decode.uniform_rows <= num_drafts and kind != "none":
        raise ValueError(
            f"decode.uniform_rows: {config.decode.uniform_rows} rows do not hold "
            f"decode.draft_len={num_drafts} drafts and the token before them; use 0 or at least "
            f"{num_drafts + 1}"
        )
    dtype = jnp.dtype(config.dtype)
    if kind == "none":
        return Drafting(NoDrafter())
    if kind == "ngram":
        return Drafting(NgramDrafter(num_drafts))
    if kind == "model":
        return _open_model(config, target, options, hook)
    graph, specs, read = _open_assistant(config, target, target_folder, dtype)
    drafter = AssistantDrafter(graph, num_drafts, options, config.decode.sample_drafts, hook)
    if kind == "combined":
        drafter = CombinedDrafter(NgramDrafter(num_drafts), drafter)
    return Drafting(drafter, specs=specs, read=read)


def _open_assistant(
    config: Config, target: ModelConfig, target_folder: Path | None, dtype: Any
) -> tuple[nnx.GraphDef, Any, Callable[[], Any]]:
    """The assistant's graph, the specs of its parameters, and what reads them."""
    name = config.decode.draft_model
    if name is None and config.model.startswith(_RANDOM):
        name = config.model
    if name is not None and name.startswith(_RANDOM):
        size = name.removeprefix(_RANDOM).partition("/")[0]
        if size not in ASSISTANTS:
            raise ValueError(
                f"decode.draft_model: no assistant of size {size!r}; "
                f"there are {', '.join(sorted(ASSISTANTS))}"
            )
        graph, specs = split(Assistant(ASSISTANTS[size], target, dtype))
        return graph, specs, lambda: random_params(specs, _SEED)
    if name is None and (inside := target_folder / ASSISTANT).is_dir():
        name = str(inside)
    if name is None and (Path(config.model).exists() or "/" not in config.model):
        raise ValueError(
            f"decode.drafter: {config.decode.drafter!r} needs an assistant and {target_folder} "
            "holds none; name its folder or hub name in decode.draft_model"
        )
    # Google publishes each model's assistant beside it under this name.
    name = name or f"{config.model}-assistant"
    folder = checkpoint.find_checkpoint(name, with_weights=False, key=_KEY)

    def read() -> Any:
        return load_assistant(checkpoint.find_checkpoint(name, key=_KEY), target, dtype)[1]

    return *declare_assistant(folder, target, dtype), read


def _open_model(
    config: Config, target: ModelConfig, options: ComputeOptions, hook: LogitsHook | None
) -> Drafting:
    name = config.decode.draft_model
    if name is None:
        raise ValueError(
            "decode.drafter: 'model' needs a smaller Gemma 4; name it in decode.draft_model"
        )
    folder = checkpoint.find_checkpoint(name, with_weights=False, key=_KEY)
    facts, _ = checkpoint.read_config(folder)
    if facts.vocab_size != target.vocab_size:
        raise ValueError(
            f"decode.draft_model: {name} has a vocabulary of {facts.vocab_size}, "
            f"the target's is {target.vocab_size}"
        )
    graph, specs = split(Gemma4(facts, jnp.dtype(config.dtype)))

    def read() -> Any:
        return checkpoint.load_params(checkpoint.find_checkpoint(name, key=_KEY), specs)

    samples = config.decode.sample_drafts
    drafter = ModelDrafter(graph, longest_draft(config), options, samples, hook)
    return Drafting(drafter, specs=specs, read=read, model=facts)
