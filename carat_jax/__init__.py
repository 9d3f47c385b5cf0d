"""Carat-JAX: an inference engine for Gemma 4 in JAX, Flax and Pallas."""

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["Config", "Engine", "SamplingParams", "__version__", "load"]

if TYPE_CHECKING:
    from carat_jax.config import Config, SamplingParams
    from carat_jax.engine.api import Engine, load

_HOMES = {
    "Config": "carat_jax.config",
    "SamplingParams": "carat_jax.config",
    "Engine": "carat_jax.engine.api",
    "load": "carat_jax.engine.api",
}


def __getattr__(name: str) -> Any:
    # Resolved on first use: a wrong flag is refused without waiting for jax to load.
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
