"""A tiny model to run commands on."""

from pathlib import Path

import pytest

from tests.builders.models import tiny_qwen2_moe


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    """Two layers of eight experts, in a folder of the test's own."""
    return tiny_qwen2_moe(tmp_path / "model")
