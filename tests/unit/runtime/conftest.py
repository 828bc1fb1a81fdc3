"""Tiny models that tests of many files serve."""

from pathlib import Path

import pytest

from tests.builders.models import tiny_qwen2_moe


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three layers of twelve experts, which no test changes."""
    return tiny_qwen2_moe(tmp_path_factory.mktemp("model"), num_layers=3, num_experts=12)


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    """Two layers of eight experts, in a folder of the test's own."""
    return tiny_qwen2_moe(tmp_path / "model")
