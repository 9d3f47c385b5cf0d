"""Counts what JAX compiles in this process: compiling in steady state is a bug.

The engine's steps have fixed shapes, so after each declared shape has been used once the count
stands still. The count comes from JAX's own monitoring events and so includes stray eager
operations, which compile too.
"""

import threading

import jax

_EVENT, _HIT = "/jax/core/compile/backend_compile_duration", "/jax/compilation_cache/cache_hits"
# Steps compile on several threads.
_lock = threading.Lock()
_total = _hits = 0


def _count(event: str, duration: float, **_: object) -> None:
    global _total
    if event == _EVENT:
        with _lock:
            _total += 1


def _count_hit(event: str, **_: object) -> None:
    global _hits
    if event == _HIT:
        with _lock:
            _hits += 1


jax.monitoring.register_event_duration_secs_listener(_count)
jax.monitoring.register_event_listener(_count_hit)


def num_compilations() -> int:
    """Compilations in this process since the package was imported."""
    return _total


def num_cache_hits() -> int:
    """How many of them were read from the persistent cache."""
    return _hits
