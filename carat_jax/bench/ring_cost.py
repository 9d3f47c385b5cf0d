"""`python -m carat_jax.bench.ring_cost`: what attention of a local layer costs inside a step.

A kernel timed alone in a chain is not what it costs between its neighbours. Here the engine's
verify pass of so many positions runs with the local layers' attention and without it (queries
stand in for its result, everything else stays), both queued, in turn; the difference over the
number of local layers is the cost of one. The kernel's norms, RoPE and cache write go with it.

    python -m carat_jax.bench.ring_cost --config configs/random-31b.yaml --output results

Appends to `ring_cost.jsonl` in --output; without it rows are only printed.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

from absl import flags

from carat_jax.bench import command, device_steps
from carat_jax.bench.measure import Records
from carat_jax.cache.append import append_attend, borrow_attend
from carat_jax.engine.api import Engine
from carat_jax.model import self_attention

_FLAGS = command.new_flags("Folder of the rows.")
_own = {"flag_values": _FLAGS}
_CONTEXT = flags.DEFINE_integer("context", 6000, "Positions each slot holds.", 1, **_own)
_BATCH = flags.DEFINE_integer("batch", 1, "Slots that decode.", 1, **_own)
_ROWS = flags.DEFINE_list("rows", ["1", "4", "8"], "Positions of a pass; one or more.", **_own)
_STEPS = flags.DEFINE_integer("steps", 20, "Steps queued between two readings.", 1, **_own)


@contextlib.contextmanager
def without_local_attention() -> Iterator[list]:
    """Steps that are traced meanwhile leave the local layers' attention out.

    Yields a list that gets an item for every attention left out.
    """
    left_out = []

    def stand_in(queries):
        left_out.append(queries.shape)
        return queries.reshape(*queries.shape[:2], -1, queries.shape[-1])

    def append(cache, new, starts, num_valid, window, options):
        if window is None:
            return append_attend(cache, new, starts, num_valid, window, options)
        return cache, stand_in(new.qkv[..., : new.group, :])

    def borrow(view, q, q_norm, eps, tables, starts, window, options):
        if window is None:
            return borrow_attend(view, q, q_norm, eps, tables, starts, window, options)
        return stand_in(q)

    patches = {"append_attend": append, "borrow_attend": borrow}
    with mock.patch.multiple(self_attention, **patches):
        yield left_out


def verify_steps(base: Engine, rows: list[int], context: int, batch: int) -> dict:
    """The verify pass of each number of rows, by (rows, whether local layers attend)."""
    sizes = {"max_batch": batch, "max_context": device_steps.with_room(base, context)}
    engine = base.variant(engine=sizes, decode={"drafter": "none"})
    whole, bare = (device_steps.filled(engine.variant(), context) for _ in range(2))
    steps = {(count, True): device_steps.verify(whole, count) for count in rows}
    for count in rows:
        with without_local_attention() as left_out:
            steps[count, False] = device_steps.verify(bare, count)
        if len(left_out) != num_local_layers(base):
            raise ValueError(
                f"--rows: local layers do not attend to {count} positions in one kernel here; it "
                "takes rings, attention.fuse_rows, attention kernels and 16 positions at most"
            )
    return steps


def num_local_layers(engine: Engine) -> int:
    """Layers that look back over a window."""
    return sum(layer.is_sliding for layer in engine.model.layers)


def main() -> int:
    """Runs the benchmark."""
    output = _FLAGS.output and Path(_FLAGS.output)
    if output:
        output.mkdir(parents=True, exist_ok=True)
    base = command.load_weights(_FLAGS)
    records = Records(output and str(output / "ring_cost.jsonl"), _FLAGS.commit)
    rows, layers = command.whole_numbers("rows", _ROWS.value), num_local_layers(base)
    steps = verify_steps(base, rows, _CONTEXT.value, _BATCH.value)
    device_steps.compile_all(steps)
    median = device_steps.medians(device_steps.alternate(steps, _STEPS.value))
    for count in rows:
        ms, without_ms = median[count, True] * 1e3, median[count, False] * 1e3
        records.add(
            bench="ring_cost", model=base.config.model, context=_CONTEXT.value,
            batch=_BATCH.value, positions=count, local_layers=layers, ms=ms,
            without_ms=without_ms, us_a_layer=(ms - without_ms) * 1e3 / layers,
        )  # fmt: skip
    return 0


if __name__ == "__main__":
    command.run(main, _FLAGS, __doc__)
