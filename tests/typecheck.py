"""The type checker that `conftest` puts on every function of the array floors."""

from collections.abc import Callable

from beartype import beartype


def checked(function: Callable) -> Callable:
    """`function` with its annotations enforced, unless it is a constructor.

    JAX rebuilds registered dataclasses around whatever a tree map yields (shapes, axis names,
    None), so what a pytree holds is checked where it is used.
    """
    return function if function.__qualname__.endswith("__init__") else beartype(function)
