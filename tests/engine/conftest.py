"""Engines that the tests of this folder share: making one costs seconds of compilation."""

import pytest

from tests.engine.toy_engine import make_engine, scripted_hook


@pytest.fixture(scope="session")
def engine():
    """Four slots, two chunk sizes, a short queue."""
    return make_engine(max_batch=4, prefill_chunks=[8, 32], max_queue=5)


@pytest.fixture(scope="session")
def scripted():
    """Two slots and one chunk size; says its lines."""
    return make_engine(hook=scripted_hook, max_batch=2, prefill_chunks=[16])


@pytest.fixture(autouse=True)
def _is_left_idle(request):
    """Whatever a test does to a shared engine, it leaves no work behind."""
    yield
    for name in {"engine", "scripted"} & set(request.fixturenames):
        shared = request.getfixturevalue(name)
        assert shared.loop.is_idle
        assert shared.stats()["running"] == shared.stats()["waiting"] == 0
