"""The answers of plain Transformers that served models must give bit for bit."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.builders.models import GREEDY, TOKENS, plain_eager


@pytest.fixture(scope="session")
def expected(folder: Path) -> tuple[Tensor, Tensor]:
    """Logits of the tokens, and what is generated from them."""
    plain = plain_eager(folder)
    with torch.no_grad():
        return plain(TOKENS).logits, plain.generate(TOKENS, **GREEDY)
