"""`python -m carat_jax.bench.kernels`: each kernel against its baselines, in one run.

Shapes of Gemma 4 31B and, where a case says so, of other sizes; bfloat16, random numbers, and NaN
past a cache's length. Every variant is checked against the float32 oracle before it is timed.
Records go to --out as JSON lines; figures are microseconds a layer, gross and net of the empty
chain that is recorded too.

    python -m carat_jax.bench.kernels --out kernels.jsonl
    python -m carat_jax.bench.kernels --cases padding --counts 5960:6081:1 --out padding.jsonl
"""

import functools

import jax
import jax.numpy as jnp
from absl import flags, logging

from carat_jax.bench import baselines, command, measure
from carat_jax.bench.expert_kernels import expert_tile_candidates, experts
from carat_jax.bench.kernel_race import (
    CAPACITY,
    GLOBAL,
    LOCAL,
    WINDOW,
    attention_shapes,
    checked_race,
    random_array,
    relative_error,
)
from carat_jax.bench.product_kernels import products
from carat_jax.bench.slot_kernels import slot_races
from pallas_kernels import (
    grouped_attention,
    per_head_attention,
    prefill_attention,
    prefill_ring_attention,
    reference,
    ring_attention,
)
from pallas_kernels.tiles import Tile

CASES = (
    *("grouped", "rows", "ring", "layouts", "padding", "prefill", "torch", "tiles"),
    *("slots", "products", "experts", "expert_tiles"),
)
_FLAGS = flags.FlagValues()
_own = {"flag_values": _FLAGS}
_CASES = flags.DEFINE_list("cases", list(CASES), "Which measurements to run.", **_own)
_OUT = flags.DEFINE_string("out", None, "File that JSON lines are appended to.", **_own)
_COMMIT = flags.DEFINE_string("commit", None, "Commit of the code, where there is no git.", **_own)
_CONTEXTS = flags.DEFINE_list("contexts", ["6005", "32005", "131005"], "Keys of `grouped`.", **_own)
_COUNTS = flags.DEFINE_string(
    "counts", "5960:6081:1", "Key counts of `padding`, from:to:step.", **_own
)
_MODEL = flags.DEFINE_enum(
    "model", "31b", ["31b", "26b-a4b", "12b"], "Whose layers `grouped` and `ring` are.", **_own
)
_ROWS = flags.DEFINE_list("rows", ["1", "4", "8", "16", "32", "64"], "Tokens of `experts`.", **_own)
flags.DEFINE_boolean("help", False, "Print this.", **_own)
_GIB = 2**30
ROTATED, LAYERS = 128, 50
# The choice is 17 programs a head with a block of 64 each, 272 in all.
RING_RIVALS = [
    Tile(rows=16, block=32, splits=16, warps=4, stages=3),
    Tile(rows=16, block=32, splits=16, warps=4, stages=4),
    Tile(rows=16, block=32, splits=8, warps=4, stages=4),
    Tile(rows=16, block=32, splits=34, warps=4, stages=1),
    Tile(rows=16, block=64, splits=8, warps=4, stages=3),
    Tile(rows=16, block=64, splits=17, warps=8, stages=1),
]


def _global_caches(shape, keys, count):
    """Layers of (k, v) and of (rotated k, v), and k_norm; the keys are those that v_rot implies."""
    size = -(-keys // 256) * 256
    full = (1, shape["kv_heads"], size, shape["head_dim"])
    norm = jnp.linspace(0.5, 1.5, shape["head_dim"]).astype(jnp.bfloat16)
    kv, v_rot = [], []
    for i in range(count):
        v = random_array(2 * i, full, 1.0, keys)
        rotated = random_array(2 * i + 1, (*full[:3], ROTATED), 1.0, keys)
        kv.append((jax.jit(reference.full_keys)(rotated, v, norm).astype(v.dtype), v))
        v_rot.append((rotated, v))
    return kv, v_rot, norm


def grouped(records, ceiling, shape, keys, num_new, *, per_head=True, three_stage=True):
    """The global attention core at one context, every layout and baseline."""
    count = 10 if keys < 20000 else 3
    kv, v_rot, norm = _global_caches(shape, keys, count)
    starts, ends = jnp.array([keys - num_new]), jnp.array([keys])
    q = random_array(99, (1, num_new, shape["heads"], shape["head_dim"]), 0.05)
    call = functools.partial(grouped_attention, impl="triton")
    variants = {
        "kv": (lambda q, k, v: call(q, k, v, starts, ends), "kv"),
        "v_rot": (lambda q, k, v: call(q, k, v, starts, ends, k_norm=norm), "v_rot"),
    }
    if three_stage:
        padded = -(-keys // 64) * 64
        clean = [tuple(jnp.where(jnp.isnan(x), 0, x) for x in pair) for pair in kv]
        for name, n in (("three_stage_exact", keys), ("three_stage_padded", padded)):
            run = functools.partial(baselines.three_stage, num_keys=n)
            variants[name] = (lambda q, k, v, run=run: run(q, k, v, starts), "clean")
    oracle = jax.jit(reference.grouped_attention)(q, *kv[0], starts, ends)
    layers = {"kv": kv, "v_rot": v_rot} | ({"clean": clean} if three_stage else {})
    one = shape["kv_heads"] * keys * 2
    moved = {"kv": one * 2 * shape["head_dim"], "v_rot": one * (shape["head_dim"] + ROTATED)}
    fixed = {"case": "grouped", **shape, "keys": keys, "positions": num_new}
    length = 60 if keys < 20000 else 12
    more = {"moved": moved, "ceiling": ceiling}
    times = checked_race(records, fixed, variants, oracle, q, layers, length=length, **more)
    ratio = {"v_rot_over_kv": times["v_rot"].net / times["kv"].net}
    if per_head:
        at = {"starts": starts, "ends": ends, "impl": "triton"}
        run = functools.partial(per_head_attention, **at)
        slow = checked_race(records, fixed, {"per_head": (run, "kv")}, oracle, q, layers, length=3)
        ratio["per_head_over_kv"] = slow["per_head"].net / times["kv"].net
    records.add(**fixed, variant="ratios", **ratio)


def ring(records, ceiling, local, num_new, rivals=()):
    """The local attention of 50 layers, kernel against XLA, or its tile against others."""
    shape = (1, local["kv_heads"], CAPACITY, local["head_dim"])
    layers = {
        "ring": [
            (random_array(2 * i, shape), random_array(2 * i + 1, shape)) for i in range(LAYERS)
        ]
    }
    starts, ends = jnp.array([5000]), jnp.array([5000 + num_new])
    q = random_array(99, (1, num_new, local["heads"], local["head_dim"]), 0.08)
    at = {"starts": starts, "ends": ends, "window": WINDOW}
    run = functools.partial(ring_attention, impl="triton", **at)
    others = {f"ring {tile}": functools.partial(run, tile=tile) for tile in rivals}
    others = others or {"xla": functools.partial(baselines.ring_xla, **at)}
    variants = {name: (call, "ring") for name, call in {"ring": run, **others}.items()}
    oracle = jax.jit(functools.partial(reference.ring_attention, **at))(q, *layers["ring"][0])
    moved = {"ring": 2 * shape[1] * (WINDOW + num_new - 1) * shape[3] * 2}
    case = "tiles" if rivals else "ring"
    fixed = {"case": case, **local, "window": WINDOW, "positions": num_new}
    more = {"length": 200, "moved": moved, "ceiling": ceiling}
    checked_race(records, fixed, variants, oracle, q, layers, **more)


def layouts(records, batch, context, memory):
    """50 local layers kept as rings, in pages or in full: time where it fits, GiB anyway."""
    kv_heads, dim, num_new = LOCAL["kv_heads"], LOCAL["head_dim"], 4
    starts = jnp.full((batch,), context - num_new)
    ends = starts + num_new
    pages = -(-context // baselines.PAGE)
    rows = {"ring": CAPACITY, "paged": pages * baselines.PAGE, "full": context}
    q = random_array(99, (batch, num_new, LOCAL["heads"], dim), 0.08)
    fixed = {"case": "layouts", **LOCAL, "batch": batch, "context": context}
    tables = jnp.arange(batch * pages).reshape(batch, pages)[:, ::-1]
    options = {"window": WINDOW}
    run = {
        "ring": lambda q, k, v: ring_attention(q, k, v, starts, ends, impl="triton", **options),
        "paged": lambda q, k, v: baselines.paged(q, k, v, tables, starts, **options),
        "full": lambda q, k, v: baselines.full(q, k, v, starts, **options),
    }
    for name, length in rows.items():
        one = 2 * batch * kv_heads * length * dim * 2
        record = dict(fixed, variant=name, layers=LAYERS, gib=LAYERS * one / _GIB)
        if LAYERS * one > 0.9 * memory:
            records.add(**record, fits=False)
            continue
        shape = (batch, kv_heads, length, dim)
        if name == "paged":
            shape = (batch * pages, baselines.PAGE, kv_heads, dim)
        count = max(2, min(LAYERS, int(0.3e9 // one)))
        cells = [(random_array(2 * i, shape), random_array(2 * i + 1, shape)) for i in range(count)]
        timing = measure.race({name: run[name]}, q, {name: cells}, length=max(count, 10))[name]
        records.add(**record, fits=True, gross_us=timing.gross, net_us=timing.net)


def padding(records, counts):
    """Three-stage time against the key count: exact, and rounded up to a multiple of 64."""
    size = -(-max(counts) // 256) * 256
    shape = (1, GLOBAL["kv_heads"], size, GLOBAL["head_dim"])
    layers = [(random_array(2 * i, shape), random_array(2 * i + 1, shape)) for i in range(10)]
    q = random_array(99, (1, 4, GLOBAL["heads"], GLOBAL["head_dim"]), 0.05)
    starts = jnp.array([counts[0] - 4])
    every = sorted({*counts, *(-(-n // 64) * 64 for n in counts)})
    for group in (every[i : i + 12] for i in range(0, len(every), 12)):
        variants = {}
        for n in group:
            whole = functools.partial(baselines.three_stage, starts=starts, num_keys=n)
            scores = functools.partial(baselines.scores_only, num_keys=n)
            variants["whole", n] = whole
            variants["scores", n] = lambda q, k, v, scores=scores: scores(q, k)
        cells = dict.fromkeys(variants, layers)
        times = measure.race(variants, q, cells, length=20, rounds=3)
        for name, n in variants:
            timing = times[name, n]
            fixed = {"case": "padding", "variant": name, "keys": n, "multiple_of_64": n % 64 == 0}
            records.add(**fixed, gross_us=timing.gross, net_us=timing.net)


def prefill(records, history, num_new=2048):
    """A chunk against its history: the global kernel and, once, the local one."""
    starts, ends = jnp.array([history]), jnp.array([history + num_new])
    cache = (1, GLOBAL["kv_heads"], history + num_new, GLOBAL["head_dim"])
    q = random_array(99, (1, num_new, GLOBAL["heads"], GLOBAL["head_dim"]), 0.05)
    k, v = random_array(1, cache), random_array(2, cache)
    run = jax.jit(functools.partial(prefill_attention, impl="triton"))
    few = jax.jit(reference.grouped_attention)(q[:, -4:], k, v, ends - 4, ends)
    error = relative_error(run(q, k, v, starts, ends)[:, -4:], few)
    seconds = measure.median_time(run, q, k, v, starts, ends, calls=3)
    pairs = num_new * history + num_new * (num_new + 1) // 2
    rate = 4 * GLOBAL["heads"] * GLOBAL["head_dim"] * pairs / seconds
    fixed = {"case": "prefill", "positions": num_new, "history": history}
    more = {"tflop_per_s": rate / 1e12, "of_790": rate / 790e12}
    records.add(**fixed, variant="global", ms=seconds * 1e3, error=error, **more)
    stages = jax.jit(functools.partial(baselines.three_stage, num_keys=history + num_new))
    error = relative_error(stages(q, k, v, starts)[:, -4:], few)
    seconds = measure.median_time(stages, q, k, v, starts, calls=3)
    rate = 4 * GLOBAL["heads"] * GLOBAL["head_dim"] * pairs / seconds
    more = {"tflop_per_s": rate / 1e12, "of_790": rate / 790e12}
    records.add(**fixed, variant="global_three_stage", ms=seconds * 1e3, error=error, **more)
    ring_shape = (1, LOCAL["kv_heads"], CAPACITY, LOCAL["head_dim"])
    new = (1, num_new, LOCAL["kv_heads"], LOCAL["head_dim"])
    q = random_array(99, (1, num_new, LOCAL["heads"], LOCAL["head_dim"]), 0.08)
    arrays = (
        random_array(1, ring_shape),
        random_array(2, ring_shape),
        random_array(3, new),
        random_array(4, new),
    )
    run = functools.partial(prefill_ring_attention, window=WINDOW)
    got = jax.jit(functools.partial(run, impl="triton"))
    want = jax.jit(functools.partial(run, impl="xla"))(q, *arrays, starts, ends)
    error = relative_error(got(q, *arrays, starts, ends), want)
    seconds = measure.median_time(got, q, *arrays, starts, ends, calls=5)
    pairs = sum(min(WINDOW, history + t + 1) for t in range(num_new))
    rate = 4 * LOCAL["heads"] * LOCAL["head_dim"] * pairs / seconds
    more = {"tflop_per_s": rate / 1e12, "of_790": rate / 790e12}
    records.add(**fixed, variant="local", ms=seconds * 1e3, error=error, **more)


def tile_candidates(records, keys):
    """The tile of each kernel against its rivals: what the choices in `tiles` rest on."""
    kv, v_rot, norm = _global_caches(GLOBAL, keys, 10 if keys < 20000 else 3)
    rivals = {
        4: [Tile(rows=32, block=32, splits=33, warps=4, stages=3)],
        8: [
            Tile(rows=32, block=32, splits=16, warps=4, stages=3),
            Tile(rows=64, block=32, splits=33, warps=8, stages=2),
            Tile(rows=64, block=32, splits=16, warps=4, stages=3, columns=256),
            Tile(rows=64, block=32, splits=16, warps=8, stages=3, columns=256),
        ],
    }
    for num_new, tiles in rivals.items():
        starts, ends = jnp.array([keys - num_new]), jnp.array([keys])
        q = random_array(99, (1, num_new, GLOBAL["heads"], GLOBAL["head_dim"]), 0.05)
        oracle = jax.jit(reference.grouped_attention)(q, *kv[0], starts, ends)
        at = {"starts": starts, "ends": ends, "impl": "triton"}
        variants = {}
        for tile in tiles:
            run = functools.partial(grouped_attention, **at, tile=tile)
            variants[f"kv {tile}"] = (run, "kv")
            if not tile.columns:
                variants[f"v_rot {tile}"] = (functools.partial(run, k_norm=norm), "v_rot")
        fixed = {"case": "tiles", **GLOBAL, "keys": keys, "positions": num_new}
        length = 60 if keys < 20000 else 12
        checked_race(records, fixed, variants, oracle, q, {"kv": kv, "v_rot": v_rot}, length=length)


def prefill_candidates(records, history=6144, num_new=2048):
    """The same for the global prefill kernel."""
    starts, ends = jnp.array([history]), jnp.array([history + num_new])
    shape = (1, GLOBAL["kv_heads"], history + num_new, GLOBAL["head_dim"])
    q = random_array(99, (1, num_new, GLOBAL["heads"], GLOBAL["head_dim"]), 0.05)
    k, v = random_array(1, shape), random_array(2, shape)
    for tile in (
        Tile(rows=64, block=32, splits=1, warps=8, stages=2),
        Tile(rows=128, block=32, splits=1, warps=8, stages=2, columns=256),
        Tile(rows=64, block=32, splits=1, warps=4, stages=3, columns=256),
        Tile(rows=64, block=32, splits=1, warps=8, stages=3, columns=256),
    ):
        run = jax.jit(functools.partial(prefill_attention, impl="triton", tile=tile))
        seconds = measure.median_time(run, q, k, v, starts, ends, rounds=3, calls=3)
        fixed = {"case": "tiles", "history": history, "positions": num_new}
        records.add(**fixed, variant=f"prefill {tile}", ms=seconds * 1e3)


def torch_sdpa(records, keys, num_new=4):
    """torch's scaled_dot_product_attention on the grouped core, where torch is installed."""
    try:
        import torch
    except ImportError:
        logging.info("torch is not installed: no SDPA rows")
        return
    options = {"dtype": torch.bfloat16, "device": "cuda"}
    heads, kv_heads, dim = GLOBAL["heads"], GLOBAL["kv_heads"], GLOBAL["head_dim"]
    q = torch.randn(1, heads, num_new, dim, **options)
    layers = [torch.randn(2, 1, kv_heads, keys, dim, **options) for _ in range(4)]
    ones = torch.ones(num_new, keys, dtype=torch.bool, device="cuda")
    mask = ones.tril(keys - num_new)
    attend = functools.partial(
        torch.nn.functional.scaled_dot_product_attention, attn_mask=mask, scale=1.0, enable_gqa=True
    )
    for layer in layers:
        attend(q, *layer)
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for i in range(40):
        attend(q, *layers[i % 4])
    stop.record()
    torch.cuda.synchronize()
    fixed = {"case": "grouped", **GLOBAL, "keys": keys, "positions": num_new}
    time_us = start.elapsed_time(stop) / 40 * 1e3
    records.add(**fixed, variant="torch_sdpa", torch=torch.__version__, gross_us=time_us)


def main():
    """Runs the chosen measurements; refuses on a machine without a GPU."""
    if unknown := [name for name in _CASES.value if name not in CASES]:
        raise ValueError(f"--cases: no case {unknown[0]!r}; there are {', '.join(CASES)}")
    contexts = command.whole_numbers("contexts", _CONTEXTS.value)
    counts = command.whole_numbers("counts", _COUNTS.value.split(":"))
    if len(counts) != 3:
        raise ValueError(f"--counts: {_COUNTS.value!r} is not from:to:step")
    tokens = command.whole_numbers("rows", _ROWS.value)
    if jax.default_backend() != "gpu":
        raise ValueError("the kernels are measured on a GPU; this machine has none")
    chosen = set(_CASES.value)
    records = measure.Records(_OUT.value, _COMMIT.value)
    ceiling = measure.read_bandwidth()
    records.add(case="read", gb_per_s=ceiling / 1e9)
    wide, local = attention_shapes(_MODEL.value)
    for keys in contexts if "grouped" in chosen else ():
        grouped(records, ceiling, wide, keys, 4)
    of_12b = attention_shapes("12b")[0]
    for shape, num_new in ((GLOBAL, 1), (GLOBAL, 8), (of_12b, 8)) if "rows" in chosen else ():
        for keys in (contexts[0], contexts[-1]):
            more = {"per_head": False, "three_stage": False}
            grouped(records, ceiling, shape, keys, num_new, **more)
    for num_new in (1, 4, 8) if "ring" in chosen else ():
        ring(records, ceiling, local, num_new)
    memory = (jax.devices()[0].memory_stats() or {}).get("bytes_limit", 0)
    for batch in (1, 8) if "layouts" in chosen else ():
        for context in (2048, 32768, 131072):
            layouts(records, batch, context, memory)
    for history in (0, 6144, 32768) if "prefill" in chosen else ():
        prefill(records, history)
    for keys in contexts if "torch" in chosen else ():
        torch_sdpa(records, keys)
    if "tiles" in chosen:
        prefill_candidates(records)
        ring(records, ceiling, LOCAL, 4, RING_RIVALS)
        for keys in (contexts[0], contexts[-1]):
            tile_candidates(records, keys)
    if "slots" in chosen:
        slot_races(records, jax.devices()[0].device_kind)
    for num_rows in (1, 4, 32) if "products" in chosen else ():
        products(records, ceiling, num_rows)
    for num_rows in tokens if "experts" in chosen else ():
        experts(records, ceiling, num_rows)
    for num_rows in tokens if "expert_tiles" in chosen else ():
        experts(records, ceiling, num_rows, list(expert_tile_candidates(num_rows)))
    if "padding" in chosen:
        padding(records, range(*counts))


if __name__ == "__main__":
    command.run(main, _FLAGS, __doc__)
