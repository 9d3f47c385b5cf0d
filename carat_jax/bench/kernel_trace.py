"""Where a step's microseconds go: its kernels from a profiler trace, by layer kind and part.

`jax.profiler` writes every kernel with the HLO instruction it came from; the compiled program's
text names the scopes of that instruction (`layer_7/mlp/norm`), which are the source's own. What
is profiled runs without CUDA graphs, so the sum of its kernels is compared with the step's time
and the time of the profiled steps themselves means nothing.
"""

import dataclasses
import re
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import jax

from carat_jax.families import ModelConfig

# Scopes that tell the part of a layer; of several in a path the innermost counts.
PARTS = ("qkv", "norm", "rope", "cache", "attend", "o", "gate_up", "gelu", "down", "experts")
# Scopes outside the layers, which are kinds of their own.
_KINDS = ("embed", "head", "draft", "accept")
_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?([\w.\-]+) = .*?([\w\-]+)\(([^)]*)\)(.*)")
_OP_NAME = re.compile(r'metadata=\{[^}]*?op_name="([^"]*)"')
_CALLED = re.compile(r"\bcalls=%?([\w.\-]+)")
_WEIGHT = re.compile(r"layers\W+(\d+)\W.*?\b(qkv|o|gate_up|down)_proj")
_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) .*\{$")
# Instructions whose event, where there is one, spans the events of what they call.
_CALLERS = ("call", "while", "conditional")
# How far to look for the scope of an instruction that the compiler left without one.
_REACH = 4


@dataclasses.dataclass(frozen=True)
class Kernel:
    """What one HLO instruction ran on the device, as an average step.

    Attributes:
      name: the kernel's name.
      op: the HLO instruction.
      scope: the path of scopes and the primitive it came from; "" where nothing tells.
      count: launches a step.
      us: microseconds a step, all launches together.
    """

    name: str
    op: str
    scope: str
    count: float
    us: float


@dataclasses.dataclass(frozen=True)
class Program:
    """What the text of a compiled program tells of its instructions.

    Attributes:
      scopes: instruction -> op_name, the path of its scopes.
      callers: instructions that only call others.
    """

    scopes: Mapping[str, str]
    callers: frozenset[str]


def read_program(hlo_text: str) -> Program:
    """Reads the scopes of every instruction from a compiled program's text.

    Some passes of the compiler drop them; such an instruction takes the scope of the weight it
    reads, or else of what it fuses, or else of its next user, or else of its operands.
    """
    scopes, callers, inside, weights = {}, set(), {}, {}
    users, operands, called, products = defaultdict(list), {}, {}, {}
    computation = ""
    for line in hlo_text.splitlines():
        if head := _COMPUTATION.match(line):
            computation = head[1]
        elif found := _INSTRUCTION.match(line):
            name, opcode, arguments, rest = found.groups()
            scope = _OP_NAME.search(rest)
            if opcode == "parameter":
                if scope and (place := _weight_scope(scope[1])):
                    weights[name] = place
                continue
            if opcode in _CALLERS:
                callers.add(name)
            if scope and opcode != "constant":
                scopes[name] = inside[computation] = scope[1]
            if opcode == "dot":
                products[computation] = name
            if target := _CALLED.search(rest):
                called[name] = target[1]
            operands[name] = re.findall(r"%([\w.\-]+)", arguments)
            for operand in operands[name]:
                users[operand].append(name)
    for name, read in operands.items():
        if len(read) == 1 and read[0] in weights:
            weights[name] = weights[read[0]]  # a weight in another type or layout

    def of_weight(name: str) -> str:
        return next((weights[read] for read in operands[name] if read in weights), "")

    # A product with something fused behind it is that product; its own scope may be left only on
    # what it reads, such as a weight that is widened.
    for name, dot in ((name, products.get(inner)) for name, inner in called.items()):
        if dot and (scope := scopes.get(dot) or of_weight(name) or _nearest(dot, scopes, operands)):
            scopes[name] = scope
    rules = (
        of_weight,
        lambda name: inside.get(called.get(name), ""),
        lambda name: _nearest(name, scopes, users),
        lambda name: _nearest(name, scopes, operands),
    )
    for rule in rules:
        found = {name: rule(name) for name in operands.keys() - scopes}
        scopes |= {name: scope for name, scope in found.items() if scope}
    return Program(scopes, frozenset(callers))


def _weight_scope(name: str) -> str:
    """The scopes of the product that reads the parameter of this name; "" if it is none."""
    is_draft = "draft" in name
    if found := _WEIGHT.search(name):
        return f"{'draft/assistant' if is_draft else 'layer'}_{found[1]}/{found[2]}"
    if "embed_tokens" not in name or "per_layer" in name:
        return ""
    return "draft/head" if is_draft else "head"


def _nearest(name: str, scopes: Mapping[str, str], edges: Mapping[str, list[str]]) -> str:
    """The scope of the nearest instruction along `edges` that has one; "" if none is near."""
    level = [name]
    for _ in range(_REACH):
        level = [other for one in level for other in edges.get(one, ())][:_REACH]
        if scope := next((scopes[other] for other in level if other in scopes), ""):
            return scope
    return ""


def record(run: Callable[[], Any], num_steps: int, hlo_text: str) -> list[Kernel]:
    """Profiles `run`, which runs `num_steps` steps of one program and waits for them.

    Returns:
      The kernels of an average step, the longest first.
    """
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            run()
        written = sorted(Path(folder).rglob("*.xplane.pb"))
        if not written:
            raise RuntimeError("the profiler wrote no trace")
        planes = jax.profiler.ProfileData.from_file(str(written[-1])).planes
        events = list(device_events(planes))
    return kernels_of(events, num_steps, read_program(hlo_text))


def device_events(planes: Iterable[Any]) -> Iterable[tuple[str, str, str, float]]:
    """(kernel, HLO instruction, op_name, microseconds) of what ran on the first device.

    On a GPU every event of its streams is a kernel or a copy; other lines repeat the same time by
    module or scope. On the CPU an event that names an instruction is one.
    """
    planes = list(planes)
    gpu = [plane for plane in planes if plane.name.startswith("/device:GPU:")]
    for plane in sorted(gpu, key=lambda p: p.name)[:1] or planes:
        for line in plane.lines:
            if gpu and not line.name.startswith("Stream"):
                continue
            for event in line.events:
                stats = dict(event.stats)
                op = str(stats.get("hlo_op", ""))
                if gpu or op:
                    scope = str(stats.get("tf_op") or stats.get("name") or "")
                    yield event.name, op, scope, event.duration_ns / 1e3


def kernels_of(
    events: Iterable[tuple[str, str, str, float]], num_steps: int, program: Program
) -> list[Kernel]:
    """Adds up the events by kernel and instruction, the longest first."""
    total: dict[tuple[str, str, str], list[float]] = defaultdict(lambda: [0, 0.0])
    by_kernel_name = {op.replace(".", "_"): op for op in program.scopes}
    for name, op, scope, us in events:
        # Instructions inside a loop are named with the loop in front.
        op = op.split("::")[-1].split("/")[-1] or by_kernel_name.get(name, "")
        if op in program.callers:
            continue
        entry = total[name, op, program.scopes.get(op) or scope]
        entry[0] += 1
        entry[1] += us
    kernels = [
        Kernel(name, op, scope, count / num_steps, us / num_steps)
        for (name, op, scope), (count, us) in total.items()
    ]
    return sorted(kernels, key=lambda kernel: -kernel.us)


def place(scope: str, model: ModelConfig) -> tuple[str, str]:
    """The layer kind and the part that a path of scopes belongs to.

    Returns:
      ("local" | "global" | "draft" | "embed" | "head" | "accept" | "rest", part). What the drafter
      runs is "draft", in the target's words for the parts of a layer.
    """
    path = scope.split("/")
    part = next((name for name in reversed(path) if name in PARTS), "rest")
    if "draft" in path:
        return "draft", part if part != "rest" else "head" if "head" in path else "rest"
    for name in path:
        if found := re.fullmatch(r"layer_(\d+)", name):
            return ("local" if model.layer(int(found[1])).is_sliding else "global"), part
    kind = next((name for name in path if name in _KINDS), "rest")
    return kind, part


def grouped(
    kernels: Iterable[Kernel], model: ModelConfig
) -> dict[tuple[str, str], tuple[float, float]]:
    """(kind, part) -> (launches, microseconds) a step, the longest first."""
    total: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0.0, 0.0])
    for kernel in kernels:
        entry = total[place(kernel.scope, model)]
        entry[0] += kernel.count
        entry[1] += kernel.us
    ordered = sorted(total.items(), key=lambda item: -item[1][1])
    return {key: (count, us) for key, (count, us) in ordered}


def over_layers(kernels: Iterable[Kernel], model: ModelConfig) -> list[Kernel]:
    """The same kernels with those of all layers of a kind added up, the longest first.

    `layer_7` of a scope becomes `local` or `global`, and the numbers at the end of a name, which
    tell the instructions of one program apart, are dropped.
    """
    total: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0.0, 0.0])
    for kernel in kernels:
        scope = re.sub(r"\blayer_\d+", lambda layer: place(layer[0], model)[0], kernel.scope)
        entry = total[re.sub(r"([_.]\d+)+$", "", kernel.name), scope]
        entry[0] += kernel.count
        entry[1] += kernel.us
    merged = [Kernel(name, "", scope, *entry) for (name, scope), entry in total.items()]
    return sorted(merged, key=lambda kernel: -kernel.us)
