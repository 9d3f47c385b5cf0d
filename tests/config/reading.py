"""What tests read from settings, and the one line that refuses them."""

import pytest

from carat_jax.config import read_settings


def values_of(settings) -> dict:
    return {key: value for key, value, _ in settings.items()}


def origins_of(settings) -> dict:
    return {key: origin for key, _, origin in settings.items()}


def refusal(*args, **kwargs) -> str:
    with pytest.raises(ValueError, match=r"\A[^\n]+\Z") as caught:  # one line, always
        read_settings(*args, **kwargs)
    return str(caught.value)
