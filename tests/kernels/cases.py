"""Named shapes of the kernels, their inputs with poison, and a float64 oracle in numpy.

Tests and benchmarks share these. The oracle walks positions slot by slot and row by row and shares
no code and no idea of layout with the kernels: it never sees a cache, only the history of keys.
"""

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True)
class Case:
    """One call: every slot has `num_new` rows ending at its entry of `ends` (0: an unused slot)."""

    name: str
    kernel: str
    ends: tuple[int, ...]
    num_new: int
    heads: int
    kv_heads: int
    head_dim: int
    size: int  # rows of the cache, or slots of the ring
    window: int | None = None
    rotated: int = 0
    pad: int = 0  # of num_new, trailing rows that are padding
    score_scale: float = 1.0  # standard deviation of the scores
    score_shift: float = 0.0  # added to every score

    @property
    def starts(self) -> tuple[int, ...]:
        """Position of every slot's row 0."""
        return tuple(max(0, end - (self.num_new - self.pad)) for end in self.ends)

    def __str__(self):
        return f"{self.kernel}-{self.name}"


@dataclasses.dataclass(frozen=True)
class Inputs:
    """The arrays of a call, float32, and the history that they were made from."""

    q: np.ndarray
    caches: tuple[np.ndarray, ...]  # k, v (ring or linear), then k_new, v_new of a chunk
    k_norm: np.ndarray | None
    keys: list[np.ndarray]  # of each slot: [K, end, H], the true keys
    values: list[np.ndarray]


def _rounded(x, dtype):
    return np.asarray(x).astype(dtype).astype(np.float32)


def make(case: Case, dtype, poison: float, seed: int = 0) -> Inputs:
    """Random inputs; whatever no query may see holds `poison`. Values are exact in `dtype`."""
    rng = np.random.default_rng(seed)
    heads, kv_heads, dim, window = case.heads, case.kv_heads, case.head_dim, case.window
    slots = len(case.ends)
    norm = _rounded(rng.uniform(0.5, 1.5, dim), dtype) if case.rotated else None
    q = rng.standard_normal((slots, case.num_new, heads, dim)) * case.score_scale / dim**0.5
    width = case.rotated or dim
    cache_k = np.full((slots, kv_heads, case.size, width), poison, np.float32)
    cache_v = np.full((slots, kv_heads, case.size, dim), poison, np.float32)
    new_k = np.full((slots, case.num_new, kv_heads, dim), poison, np.float32)
    new_v = np.full((slots, case.num_new, kv_heads, dim), poison, np.float32)
    keys, values = [], []
    half, rotated_half = dim // 2, case.rotated // 2
    columns = np.r_[0:rotated_half, half : half + rotated_half]
    for b, (start, end) in enumerate(zip(case.starts, case.ends, strict=True)):
        value = _rounded(rng.standard_normal((kv_heads, end, dim)), dtype)
        if case.rotated:
            key = value * norm
            key[..., columns] = _rounded(rng.standard_normal((kv_heads, end, case.rotated)), dtype)
        else:
            key = rng.standard_normal((kv_heads, end, dim))
            key[..., 0] = 1.0  # so that q's first number shifts every score
            key = _rounded(key, dtype)
            q[b, ..., 0] = case.score_shift
        keys.append(key)
        values.append(value)
        first = 0 if window is None else max(0, start - window + 1)
        in_cache = np.arange(first, start if case.kernel == "prefill_ring" else end)
        row = in_cache % case.size if "ring" in case.kernel else in_cache
        cache_k[b][:, row] = (key[..., columns] if case.rotated else key)[:, in_cache]
        cache_v[b][:, row] = value[:, in_cache]
        if case.kernel == "prefill_ring":
            new_k[b, : end - start] = key[:, start:].swapaxes(0, 1)
            new_v[b, : end - start] = value[:, start:].swapaxes(0, 1)
    caches = (cache_k, cache_v)
    if case.kernel == "prefill_ring":
        caches += (new_k, new_v)
    q = q.astype(np.float32) if case.rotated else _rounded(q, dtype)
    return Inputs(q, caches, norm, keys, values)


def expected(case: Case, inputs: Inputs) -> np.ndarray:
    """Attention in float64, [B, T, N, H]; padding rows and unused slots are zero."""
    out = np.zeros(inputs.q.shape)
    group = case.heads // case.kv_heads
    for b, (start, end) in enumerate(zip(case.starts, case.ends, strict=True)):
        key, value = inputs.keys[b].astype(np.float64), inputs.values[b].astype(np.float64)
        for t in range(min(case.num_new, end - start)):
            position = start + t
            oldest = 0 if case.window is None else max(0, position - case.window + 1)
            k, v = key[:, oldest : position + 1], value[:, oldest : position + 1]
            q = inputs.q[b, t].astype(np.float64).reshape(case.kv_heads, group, case.head_dim)
            scores = np.einsum("kgh,kjh->kgj", q, k)
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            weights /= weights.sum(-1, keepdims=True)
            out[b, t] = np.einsum("kgj,kjh->kgh", weights, v).reshape(case.heads, case.head_dim)
    return out


def live(case: Case) -> np.ndarray:
    """[B, T]: rows that are neither padding nor of an unused slot."""
    counts = np.array(case.ends) - np.array(case.starts)
    return np.arange(case.num_new)[None] < counts[:, None]


def _case(kernel, name, ends, num_new, heads, kv_heads, head_dim, **more) -> Case:
    """A case whose cache or ring is no larger than it must be, plus a few rows to poison."""
    window = more.get("window")
    if "size" not in more:
        spare = 1 if kernel == "prefill_ring" else num_new
        need = max(ends) + 7 if "ring" not in kernel else window + spare
        more["size"] = need if "ring" not in kernel else -(-need // 32) * 32
    return Case(name, kernel, tuple(ends), num_new, heads, kv_heads, head_dim, **more)


SMALL = (  # every kernel and every kind of trouble, small enough for the interpreter
    _case(
        "ring",
        "before_and_past_the_seam",
        (0, 3, 64, 67, 96, 97, 131, 1000),
        3,
        4,
        2,
        32,
        window=64,
    ),
    _case("ring", "one_row", (1, 2, 64, 65, 95, 96, 97, 640), 1, 8, 4, 32, window=64),
    _case("ring", "five_rows_odd_group", (5, 70, 101), 5, 6, 2, 64, window=48),
    _case(
        "ring",
        "large_scores",
        (40, 200),
        2,
        4,
        2,
        32,
        window=64,
        score_scale=3.0,
        score_shift=900.0,
    ),
    _case("ring", "very_negative_scores", (40, 200), 2, 4, 2, 32, window=64, score_shift=-30000.0),
    _case("grouped", "uneven_slots", (0, 4, 31, 32, 33, 300), 4, 8, 1, 64),
    _case("grouped", "padding_rows", (9, 130), 4, 4, 2, 32, pad=2),
    _case("grouped", "very_negative_scores", (5, 40), 2, 4, 2, 32, score_shift=-30000.0),
    _case("grouped", "large_scores", (5, 40), 2, 4, 2, 32, score_scale=3.0, score_shift=900.0),
    _case("grouped", "row_tiles", (150,), 16, 16, 1, 32),
    _case("grouped", "window_in_a_full_cache", (3, 64, 65, 200), 3, 4, 2, 32, window=48),
    _case("grouped", "wide_head", (70,), 4, 4, 2, 512),
    _case("v_rot", "uneven_slots", (0, 4, 33, 200), 4, 8, 1, 64, rotated=16),
    _case("v_rot", "wide_head", (70,), 2, 4, 2, 512, rotated=128),
    _case("per_head", "uneven_slots", (0, 4, 33, 200), 4, 4, 2, 64),
    _case("prefill", "chunk_on_history", (0, 40, 170), 40, 8, 1, 64, pad=3),
    _case("prefill", "window_in_a_full_cache", (100, 211), 50, 4, 2, 32, window=48),
    _case("prefill_v_rot", "chunk_on_history", (33, 190), 33, 8, 1, 64, rotated=16),
    _case("prefill_ring", "first_chunk", (0, 90, 100), 100, 4, 2, 32, window=64, pad=10),
    _case("prefill_ring", "around_the_ring", (150, 222, 1000), 70, 4, 2, 32, window=64),
    _case("prefill_ring", "short_chunk", (65, 97, 500), 5, 4, 2, 32, window=64),
)


def _round_lengths(limit):
    powers = [1 << i for i in range(9, limit.bit_length())]
    return tuple(range(1, 301)) + tuple(p + d for p in powers for d in (-1, 0, 1))


LENGTHS = _round_lengths(4097)

FULL = (  # the real shapes; on a GPU
    *(
        _case("ring", f"31b_{t}", (0, 800, 1024, 1100, 9000), t, 32, 16, 256, window=1024)
        for t in (1, 2, 4, 8, 16)
    ),
    _case("ring", "12b", (5000, 17), 4, 16, 8, 256, window=1024),
    _case("ring", "e2b", (513, 4000), 4, 8, 1, 256, window=512),
    *(_case("grouped", f"31b_{t}", (t, 33, 0, 6005), t, 32, 4, 512) for t in (1, 3, 4, 8, 16)),
    _case("grouped", "31b_long", (32005,), 4, 32, 4, 512),
    _case("grouped", "12b_256_rows", (2050,), 16, 16, 1, 512),
    _case("grouped", "12b_128_rows", (6005,), 8, 16, 1, 512),
    *(_case("grouped", f"head_{h}", (7, 1030), 4, 8, 2, h) for h in (32, 64, 128, 256, 512)),
    *(
        _case("v_rot", f"31b_{t}", (t, 33, 0, 6005), t, 32, 4, 512, rotated=128)
        for t in (1, 4, 8, 16)
    ),
    _case("v_rot", "31b_long", (32005,), 4, 32, 4, 512, rotated=128),
    _case("v_rot", "12b_128_rows", (6005,), 8, 16, 1, 512, rotated=128),
    _case("per_head", "31b", (33, 2050), 4, 32, 4, 512),
    _case("prefill", "31b", (512, 1500), 512, 32, 4, 512, pad=12),
    _case("prefill_v_rot", "31b", (512, 1500), 512, 32, 4, 512, rotated=128),
    _case("prefill_ring", "31b", (500, 3000), 512, 32, 16, 256, window=1024, pad=12),
    _case("prefill_ring", "tiny", (100, 3000), 128, 8, 4, 32, window=64),
)
