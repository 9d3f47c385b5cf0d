"""Where compiled steps are kept: JAX is told of a folder, never of another than the user's own."""

import logging
from pathlib import Path

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

from carat_jax.config import read_settings
from carat_jax.engine import compile_cache
from carat_jax.engine.compile_cache import use_compile_cache

KEYS = (
    "jax_enable_compilation_cache", "jax_compilation_cache_dir",
    "jax_persistent_cache_min_compile_time_secs", "jax_persistent_cache_min_entry_size_bytes",
)  # fmt: skip


@pytest.fixture(autouse=True)
def home(monkeypatch, tmp_path):
    """A user's cache folder, and JAX as it was before; nothing is compiled in these tests."""
    before = {key: getattr(jax.config, key) for key in KEYS}
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(compile_cache, "_given", None)
    jax.config.update("jax_enable_compilation_cache", True)
    jax.config.update("jax_compilation_cache_dir", None)  # the one of this test run
    yield tmp_path / "home"
    for key, value in before.items():
        jax.config.update(key, value)
    compilation_cache.reset_cache()


def told() -> str | None:
    return jax.config.jax_compilation_cache_dir


def test_the_default_is_in_the_users_cache_folder_and_keeps_small_programs_too(home):
    folder = use_compile_cache(None)
    # a folder of its own for this kind of CPU
    assert folder.parent == home / "carat_jax" / "xla"
    assert folder.name.startswith("cpu-")
    assert folder.stat().st_mode & 0o777 == 0o700
    assert told() == str(folder)
    assert jax.config.jax_persistent_cache_min_compile_time_secs == 0
    assert jax.config.jax_persistent_cache_min_entry_size_bytes == -1
    assert use_compile_cache(None) == folder
    assert list(folder.iterdir()) == []


def test_without_xdg_it_is_dot_cache(monkeypatch, tmp_path):
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "somebody"))
    assert use_compile_cache(None).parent == tmp_path / "somebody" / ".cache" / "carat_jax" / "xla"


def test_another_kind_of_cpu_has_another_folder(monkeypatch):
    own = use_compile_cache(None)
    monkeypatch.setattr(compile_cache, "_cpu_features", lambda: "another")
    assert use_compile_cache(None) == own.parent / "cpu-another"
    assert told() == str(own.parent / "cpu-another")


def test_a_gpu_needs_no_such_folder(home, monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert use_compile_cache(None) == home / "carat_jax" / "xla"


def test_a_folder_can_be_named_and_the_cache_turned_off(tmp_path):
    assert use_compile_cache(str(tmp_path / "mine")).parent == tmp_path / "mine"
    assert use_compile_cache("off") is None
    assert told() is None


def test_the_users_own_cache_is_left_alone(caplog):
    jax.config.update("jax_compilation_cache_dir", "/somewhere/else")
    for setting in (None, "off", "/another/place"):
        assert use_compile_cache(setting) == Path("/somewhere/else")
        assert told() == "/somewhere/else"
    # what was asked for and not done is said
    assert [record.getMessage() for record in caplog.records] == [
        "engine.compile_cache: JAX has a cache of its own, /somewhere/else"
    ] * 2


def test_jaxs_own_switch_turns_it_off(home):
    jax.config.update("jax_enable_compilation_cache", False)
    assert use_compile_cache(None) is None
    assert told() is None
    assert not home.exists()


def test_a_folder_that_cannot_be_written_is_one_warning(tmp_path, caplog):
    (tmp_path / "file").write_text("in the way")
    with caplog.at_level(logging.INFO):
        assert use_compile_cache(str(tmp_path / "file" / "below")) is None
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert "cannot be written" in record.getMessage()
    assert told() is None


def test_the_setting_is_null_off_or_a_folder():
    def setting(text):
        return read_settings(overrides=[f"engine.compile_cache={text}"]).build().engine

    assert setting("null").compile_cache is None
    assert setting("off").compile_cache == "off"
    assert setting("./here").compile_cache == "./here"
    for text in ("false", "true", "auto", "here"):
        with pytest.raises(ValueError, match="must be off, or a path with a /"):
            setting(text)
