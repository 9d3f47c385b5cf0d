"""A file of settings."""

from pathlib import Path

import pytest


@pytest.fixture
def write(tmp_path):
    def write_yaml(text: str) -> Path:
        path = tmp_path / "run.yaml"
        path.write_text(text, encoding="utf-8")
        return path

    return write_yaml
