"""The static shapes and choices an engine is compiled for, worked out from its settings.

Pure functions, asked once at the start.
"""

import jax

from carat_jax.config import Config
from carat_jax.decoding.steps import StepOptions
from carat_jax.families import ModelConfig
from carat_jax.numerics.options import ComputeOptions
from carat_jax.numerics.padding import EXACT, default_rungs

# Alternatives a sampler with log-probabilities returns, at most.
MAX_TOP_LOGPROBS = 20
# Positions that are scored at once: float32 logits of a 31B take 2 GiB for as many.
MAX_SCORED = 2048


def compute_options(config: Config, backend: str | None = None) -> ComputeOptions:
    """Which implementations run under these settings on `backend`, by default this machine's.

    Without a named implementation the rule is: the Pallas kernels on a GPU in bfloat16, products
    only where theirs was measured to be no slower, and plain JAX elsewhere.

    Raises:
      ValueError: the implementation named cannot run here; it is never replaced by another.
    """
    backend = backend or jax.default_backend()
    return ComputeOptions(
        impl=_implementation(config, "attention", backend),
        experts=_implementation(config, "moe", backend, plain="dense"),
        products=_implementation(config, "products", backend, kernel="measured"),
        is_fused=config.attention.verify == "fused",
        group_heads=config.attention.group_heads,
        # Fused, a key is summed with the rows it came with: another order in verify than in decode.
        fuse_rows=config.attention.fuse_rows and not config.decode.uniform_rows,
    )


def step_options(config: Config, model: ModelConfig, backend: str | None = None) -> StepOptions:
    """What the steps are compiled for, on `backend` or this machine's."""
    return StepOptions(
        compute=compute_options(config, backend),
        num_top=min(MAX_TOP_LOGPROBS, model.vocab_size),
        uniform_rows=config.decode.uniform_rows,
        simulate_acceptance=config.decode.simulate_acceptance,
        rounds_per_call=config.decode.rounds_per_call,
    )


def _implementation(
    config: Config, section: str, backend: str, kernel: str = "triton", plain: str = "xla"
) -> str:
    """What a section's `impl` stands for: its own value, or by the rule `kernel` or `plain` JAX."""
    key, impl, dtype = f"{section}.impl", getattr(config, section).impl, config.dtype
    if impl is None:
        return kernel if backend == "gpu" and dtype == "bfloat16" else plain
    if impl == "triton" and backend != "gpu":
        raise ValueError(f"{key}: 'triton' needs a GPU, this is {backend}; use {plain!r}")
    if impl == "triton" and dtype != "bfloat16":
        raise ValueError(f"{key}: 'triton' needs bfloat16, dtype is {dtype}")
    return impl


def max_context(config: Config, model: ModelConfig) -> int:
    """Positions a slot holds.

    Raises:
      ValueError: more were asked for than the model was made for.
    """
    limit, asked = model.max_position_embeddings, config.engine.max_context
    if asked is None:
        return min(limit, 8192)
    if asked > limit:
        raise ValueError(f"engine.max_context: {asked} is above the model's own limit of {limit}")
    return asked


def key_rungs(config: Config, max_context: int) -> tuple[int, ...]:
    """Key counts the three-stage path is compiled for; none where every length is its own."""
    pad = config.attention.pad_keys
    return () if pad == EXACT else default_rungs(pad, max_context)


def verify_rows(config: Config, num_drafts: int) -> int:
    """Rows a slot of a verify pass, for a drafter of `num_drafts`."""
    return max(num_drafts + 1, config.decode.uniform_rows)


def prefill_sizes(config: Config) -> tuple[int, ...]:
    """Chunk sizes that prompts are cut into.

    With `uniform_rows` those within the budget: who else runs must not change how a prompt is cut,
    and with it the last bits of its rows.
    """
    engine = config.engine
    if not config.decode.uniform_rows or engine.prefill_budget is None:
        return engine.prefill_chunks
    return tuple(size for size in engine.prefill_chunks if size <= engine.prefill_budget)


def score_sizes(config: Config) -> tuple[int, ...]:
    """Chunk sizes of scoring, which holds the logits of a whole chunk."""
    sizes = prefill_sizes(config)
    return tuple(size for size in sizes if size <= MAX_SCORED) or sizes[:1]


def reuses_prefix(config: Config) -> bool:
    """Whether slots are continued from.

    Not with `uniform_rows`: rows that were decoded and rows that were prefilled differ in their
    last bits, and which of them a prompt finds in a slot depends on when others ended.
    """
    return config.engine.reuse_prefix and not config.decode.uniform_rows


def ring_rows(config: Config, num_drafts: int) -> int:
    """Rows a ring holds beyond its window, for a drafter of `num_drafts`: see `cache.ring`.

    A verify pass is written in place. Where slots are continued from, what one call of rounds
    wrote past a stop, and what the next one, dispatched before the host saw the stop, wrote after
    it, lies ahead of the ids that count.
    """
    num_rows = verify_rows(config, num_drafts)
    past_a_stop = 2 * config.decode.rounds_per_call * (num_drafts + 1)
    return max(num_rows, past_a_stop) if reuses_prefix(config) else num_rows


def size_text(num_bytes: int) -> str:
    """Bytes as a person reads them."""
    return f"{num_bytes / 2**20:.1f} MiB" if num_bytes < 2**30 else f"{num_bytes / 2**30:.2f} GiB"
