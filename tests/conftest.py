"""How tests run: on the CPU unless CARAT_TEST_GPU is set, array shapes checked in every call.

Two virtual CPU devices are there for the sharding test; everything else stays on the first. The
array floors are imported through jaxtyping's hook, so each annotated shape and type is enforced.
The floors above deal in plain Python values, whose wrong types they refuse themselves and in words.
"""

import importlib.util
import os
import tempfile

import pytest
from jaxtyping import install_import_hook

import tests.typecheck  # noqa: F401  (the hook finds its checker among what is imported)

# One compilation cache for the whole run, its workers and the programs they start: many tests
# build the same small engine. It is empty at first and gone at the end; nobody else's is written.
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    _cache = tempfile.TemporaryDirectory(prefix="carat-jax-tests-")
    os.environ["JAX_COMPILATION_CACHE_DIR"] = _cache.name
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.05"
    os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
if not os.environ.get("CARAT_TEST_GPU"):
    os.environ["JAX_PLATFORMS"] = "cpu"
    _flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=2"
    # Half of the run is compiling, most of it LLVM's optimisations, which a test hardly ever earns
    # back. `.ci/run` has them where it compares with transformers and on the newest jax.
    if "xla_backend_optimization_level" not in _flags:
        _flags += " --xla_backend_optimization_level=0"
    os.environ["XLA_FLAGS"] = _flags.strip()

_ARRAY_FLOORS = ("numerics", "cache", "model", "decoding")
install_import_hook(
    ["pallas_kernels", *(f"carat_jax.{floor}" for floor in _ARRAY_FLOORS)],
    "tests.typecheck.checked",
)


def pytest_collection_modifyitems(items):
    """Comparisons with transformers need the extra `parity`."""
    if importlib.util.find_spec("transformers") and importlib.util.find_spec("torch"):
        return
    for item in items:
        if item.get_closest_marker("parity"):
            item.add_marker(pytest.mark.skip(reason="needs the extra `parity`"))
