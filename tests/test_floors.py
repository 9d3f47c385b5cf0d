"""The layering of the source, read from its imports without importing anything.

A file imports only from its own floor or lower ones, the kernels know nothing of the engine, and
what has nothing to do with arrays does not import jax.
"""

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FLOORS = {
    "config": 0, "setting_types": 0, "setting_sources": 0,
    "families": 0, "assistant_families": 0, "array_types": 0,
    "numerics": 1,
    "cache": 2,
    "model": 3,
    "decoding": 4,
    "engine": 5,
    "prompt_files": 6, "generate": 6, "convert": 6, "plan": 6, "bench": 6,
}  # fmt: skip
# The package itself only names what `engine.api` offers; the tiny model's folder holds no code.
NO_FLOOR = {"__init__", "__main__", "tiny"}
WITHOUT_JAX = (
    *("scheduler", "prefixes", "chunks", "feeding", "request", "counters"),
    *("tokenizer", "chat", "text_stream"),
)


def sources(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


def module(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def imports(path: Path) -> set[str]:
    """Full names of all modules a file imports, wherever in the file it does."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import in line {node.lineno}"
            found.add(node.module)
            found |= {f"{node.module}.{name.name}" for name in node.names}
    return found


def floor(name: str) -> int | None:
    """The floor of `carat_jax.part...`; None for what has none."""
    parts = name.split(".")
    return FLOORS.get(parts[1]) if parts[0] == "carat_jax" and len(parts) > 1 else None


def test_every_part_of_the_package_has_a_floor():
    parts = {path.relative_to(ROOT / "carat_jax").parts[0] for path in sources("carat_jax")}
    assert {part.removesuffix(".py") for part in parts} <= FLOORS.keys() | NO_FLOOR


@pytest.mark.parametrize("path", sources("carat_jax"), ids=module)
def test_imports_come_from_the_same_floor_or_below(path):
    own = floor(module(path))
    if own is not None:
        above = {name for name in imports(path) if (floor(name) or 0) > own}
        assert not above


@pytest.mark.parametrize("path", sources("pallas_kernels"), ids=module)
def test_kernels_know_nothing_of_the_engine(path):
    known = {name.split(".")[0] for name in imports(path)}
    allowed = {"jax", "jaxtyping", "numpy", "pallas_kernels"}
    assert known <= allowed | set(sys.stdlib_module_names)


@pytest.mark.parametrize("name", WITHOUT_JAX)
def test_text_and_scheduling_are_free_of_jax(name):
    reached, waiting = set(), [f"carat_jax.engine.{name}"]
    while waiting:
        current = waiting.pop()
        path = ROOT.joinpath(*current.split(".")).with_suffix(".py")
        if current not in reached and path.exists():
            reached.add(current)
            waiting += imports(path)
            roots = {found.split(".")[0] for found in imports(path)}
            assert not roots & {"jax", "jaxlib", "flax", "jaxtyping"}, current
    assert f"carat_jax.engine.{name}" in reached


def test_no_file_is_named_for_being_a_rest():
    for path in (*sources("carat_jax"), *sources("pallas_kernels"), *sources("tests")):
        for word in ("util", "helper", "manager", "misc", "common"):
            assert word not in path.stem


def test_files_say_what_they_are_and_stay_short_enough_to_read():
    for path in (*sources("carat_jax"), *sources("pallas_kernels")):
        text = path.read_text()
        assert len(text.splitlines()) <= 450, path
        assert not text or ast.get_docstring(ast.parse(text)), path
