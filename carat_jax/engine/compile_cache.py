"""JAX's persistent compilation cache, on by default in the user's own cache folder.

What was compiled once is read back the next time the same program meets the same device and the
same versions; JAX keys it by all of these. A cache that JAX was told of by itself
(JAX_COMPILATION_CACHE_DIR, or `jax.config`) is left as it is, whatever the settings say. A cached
executable is trusted: the folder is created for its owner alone.
"""

import hashlib
import logging
import os
import platform
import tempfile
from pathlib import Path

import jax
from jax.experimental.compilation_cache import compilation_cache

OFF = "off"
_log = logging.getLogger(__name__)
# The folder that this module last gave to JAX: any other is the user's.
_given: str | None = None


def use_compile_cache(setting: str | None) -> Path | None:
    """Points JAX at the folder that `engine.compile_cache` names, before anything is compiled.

    Args:
      setting: a folder, `off`, or None for `carat_jax/xla` in the user's cache folder.

    Returns:
      The folder in use; None without one. A folder that cannot be written is a warning, once.
    """
    global _given
    current = jax.config.jax_compilation_cache_dir
    if not jax.config.jax_enable_compilation_cache:
        return None
    if current is not None and current != _given:
        if setting is not None:
            _log.warning("engine.compile_cache: JAX has a cache of its own, %s", current)
        return Path(current)
    folder = None if setting == OFF else _writable(_named(setting))
    chosen = None if folder is None else str(folder)
    if chosen != current:
        jax.config.update("jax_compilation_cache_dir", chosen)
        compilation_cache.reset_cache()  # JAX opens its cache once
    if chosen is not None:
        # Without these JAX keeps only what took a second, and a start is many small programs.
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    _given = chosen
    return folder


def _named(setting: str | None) -> Path:
    """The folder a setting stands for, on this kind of machine."""
    if setting is not None:
        folder = Path(setting).expanduser()
    else:
        home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        folder = Path(home) / "carat_jax" / "xla"
    if jax.default_backend() != "cpu":
        return folder
    # Machine code for one CPU can be illegal on another, and home folders are shared between them.
    return folder / f"cpu-{_cpu_features()}"


def _cpu_features() -> str:
    """Eight digits that stand for what this CPU can do."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        known = [line for line in lines if line.startswith(("model name", "flags", "Features"))]
        text = "\n".join(sorted(set(known)))
    except OSError:
        text = f"{platform.machine()} {platform.processor()}"
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def _writable(folder: Path) -> Path | None:
    """The folder, created if need be; None, with a warning, if nothing can be written to it."""
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError as error:
        _log.warning(
            "engine.compile_cache: %s cannot be written (%s): every start compiles anew",
            *(folder, error.strerror),
        )
        return None
