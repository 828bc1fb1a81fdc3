"""Tiny models that tests of many files serve, and the answers that one must give bit for bit."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.builders.models import GREEDY, TOKENS, plain_eager, tiny_qwen2_moe


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three layers of twelve experts, which no test changes."""
    return tiny_qwen2_moe(tmp_path_factory.mktemp("model"), num_layers=3, num_experts=12)


@pytest.fixture(scope="session")
def expected(folder: Path) -> tuple[Tensor, Tensor]:
    """Of plain Transformers: logits of the tokens, and what is generated from them."""
    plain = plain_eager(folder)
    with torch.no_grad():
        return plain(TOKENS).logits, plain.generate(TOKENS, **GREEDY)


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    """Two layers of eight experts, in a folder of the test's own."""
    return tiny_qwen2_moe(tmp_path / "model")
