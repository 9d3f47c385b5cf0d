"""Counts what JAX compiles in this process: compiling in steady state is a bug.

The engine's steps have fixed shapes, so after each declared shape has been used once the count
stands still. The count comes from JAX's own monitoring events and so includes stray eager
operations, which compile too.
"""

import jax

_EVENT = "/jax/core/compile/backend_compile_duration"
_total = 0


def _count(event: str, duration: float, **_: object) -> None:
    global _total
    if event == _EVENT:
        _total += 1


jax.monitoring.register_event_duration_secs_listener(_count)


def num_compilations() -> int:
    """Compilations in this process since the package was imported."""
    return _total
