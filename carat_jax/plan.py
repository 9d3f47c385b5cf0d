"""`python -m carat_jax.plan --config F`: what an engine takes of its device, before it is loaded.

Prints the bytes of weights, caches and workspace, for a slot and in all, and the largest context of
each batch size that fits. Reads config.json and, where the weights are there, their headers. The
device is this machine's GPU, or one of --device_memory_gib. --json prints one line of bytes.
Exit codes: 0 it fits or the device is not known, 1 it does not fit, 2 bad input.
"""

import json
import sys
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from absl import flags
from flax import nnx

from carat_jax.bench.command import whole_numbers
from carat_jax.config import read_settings
from carat_jax.decoding.steps import build_steps
from carat_jax.engine.api import draw, locate
from carat_jax.engine.compile_ahead import Ahead, workspaces
from carat_jax.engine.memory import Blueprint, device_limit, new_state
from carat_jax.engine.shapes import key_rungs, size_text, step_options
from carat_jax.model import checkpoint

_BATCHES = ["1", "2", "4", "8", "16", "32"]


def _flags() -> flags.FlagValues:
    known = flags.FlagValues()
    own = {"flag_values": known}
    flags.DEFINE_string("config", None, "YAML settings, e.g. configs/gemma4-31b.yaml.", **own)
    flags.DEFINE_multi_string("set", [], "A setting, e.g. engine.max_batch=8; repeatable.", **own)
    flags.DEFINE_float(
        "device_memory_gib",
        None,
        "GiB that JAX may take on the GPU planned for, instead of this machine's.",
        lower_bound=0,
        **own,
    )
    flags.DEFINE_list("batches", _BATCHES, "Batch sizes of the table.", **own)
    flags.DEFINE_boolean(
        "measure",
        False,
        "Compile the neediest steps for this machine's device, without weights, and print the "
        "workspace of each beside the estimate.",
        **own,
    )
    flags.DEFINE_boolean("json", False, "One line of JSON, in bytes.", **own)
    flags.DEFINE_boolean("help", False, "Print this.", **own)
    return known


def blueprint(
    settings: Sequence[str], config: str | None, backend: str | None
) -> tuple[nnx.GraphDef, Blueprint]:
    """The model and the engine of a YAML file and `key=value` overrides, from small files alone.

    Raises:
      ValueError: a setting, the checkpoint or the drafter cannot be used.
    """
    folder, model, merged = locate(read_settings(config, settings))
    wanted = merged.build()
    graph, plan = draw(wanted, model, folder, backend)
    if not wanted.model.startswith("random:"):
        checkpoint.check_headers(folder, plan.specs)
    return graph, plan


def measured(graph: nnx.GraphDef, plan: Blueprint) -> dict[str, int]:
    """Bytes of workspace of the neediest steps, compiled here for arrays that do not exist."""
    config, model, drafter = plan.config, plan.model, plan.drafting.drafter
    options = step_options(config, model)
    steps = build_steps(graph, drafter, options, jnp.zeros(model.vocab_size))
    specs = {"target": plan.specs, "draft": plan.drafting.specs}
    params = jax.tree.map(lambda spec: jax.ShapeDtypeStruct(spec.shape, spec.dtype), specs)
    state = jax.eval_shape(lambda: new_state(config, model, plan.drafting, plan.options))
    rounds, rungs = {drafter.num_drafts: steps.round}, key_rungs(config, plan.max_context)
    ahead = Ahead(steps, rounds, options, config, rungs, plan.max_context)
    return workspaces(ahead.neediest(params, state))


def report(plan: Blueprint, limit: int | None, batches: Sequence[int]) -> dict[str, Any]:
    """All figures, in bytes and positions."""
    memory = plan.memory()
    largest = {} if limit is None else {n: plan.sized(n).largest_context(limit) for n in batches}
    return {
        "model": plan.config.model,
        "dtype": plan.config.dtype,
        "backend": plan.backend,
        "max_batch": plan.max_batch,
        "max_context": plan.max_context,
        "local_layers": plan.config.cache.local_layers,
        "global_layers": plan.config.cache.global_layers,
        "drafter": plan.drafting.drafter.name,
        "bytes": memory.parts(),
        "bytes_a_slot": memory.a_slot(),
        "total": memory.total,
        "limit": limit,
        "fits": None if limit is None else memory.total <= limit,
        "largest_context": largest,
        "model_limit": plan.model.max_position_embeddings,
    }


def table(found: dict[str, Any]) -> str:
    """`report` as a person reads it."""
    lines = [
        f"{found['model']} in {found['dtype']}, {found['max_batch']} x {found['max_context']:,} "
        f"positions, local layers: {found['local_layers']}, "
        f"global layers: {found['global_layers']}, drafter: {found['drafter']}",
        "",
        f"{'':<18}{'a slot':>12}{'in all':>12}",
    ]
    for name, size in found["bytes"].items():
        share = found["bytes_a_slot"].get(name)
        label = "workspace, at most" if name == "workspace" else name
        lines.append(f"{label:<18}{size_text(share) if share else '':>12}{size_text(size):>12}")
    lines.append(f"{'total':<18}{'':>12}{size_text(found['total']):>12}")
    if found["limit"] is not None:
        verdict = "fits" if found["fits"] else "DOES NOT FIT"
        lines.append(f"{found['device']:<18}{'':>12}{size_text(found['limit']):>12}  {verdict}")
    if "measured" in found:
        lines += ["", "workspace of the neediest steps as compiled here"]
        lines += [f"{size_text(size):>12}  {name}" for name, size in found["measured"].items()]
    if found["limit"] is None:
        note = "does not say how much it holds; give --device_memory_gib to see what fits a GPU"
        return "\n".join([*lines, "", f"{found['device']} {note}"])
    lines += ["", f"{'batch':<8}largest context"]
    for batch, context in found["largest_context"].items():
        note = "  (the model's limit)" if context == found["model_limit"] else ""
        lines.append(f"{batch:<8}{f'{context:,}' if context else 'none':>15}{note}")
    return "\n".join(lines)


def main(arguments: Sequence[str]) -> int:
    """Runs the command; returns its exit code."""
    options = _flags()
    try:
        extra = options(arguments)[1:]
        if options["help"].value:
            print(__doc__, options.get_help(), sep="\n")
            return 0
        if extra:
            raise ValueError(f"{extra[0]!r} is not a flag; --help lists them")
        batches = options.batches and whole_numbers("batches", options.batches)
        backend, limit = None, device_limit()
        if options.device_memory_gib is not None:
            backend, limit = "gpu", int(options.device_memory_gib * 2**30)
        graph, plan = blueprint(options["set"].value, options.config, backend)
        device = "a GPU" if backend else f"this {jax.devices()[0].device_kind}"
        found = {"device": device, **report(plan, limit, batches)}
        if options.measure:
            if backend is not None:
                raise ValueError("--measure: compiles for this machine, not for another device")
            found["measured"] = measured(graph, plan)
    except (flags.Error, ValueError, NotImplementedError) as error:
        print(f"error: {str(error).replace(chr(10), ' ')}", file=sys.stderr)
        return 2
    print(json.dumps(found) if options.json else table(found))
    return 1 if found["fits"] is False else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
