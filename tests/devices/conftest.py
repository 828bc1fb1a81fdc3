"""The devices that tests run on: a simulated one, and a real one with `-m gpu`."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from runtime.accelerator import find_accelerator
from runtime.config import Exact, ModelConfig
from tests.builders.serving import speaking_model
from tests.builders.sim_device.backend import simulated
from tests.builders.sim_device.streams import SimDevices
from tests.unit.runtime.conftest import folder

__all__ = ["device", "folder", "sim", "speaking"]


@pytest.fixture
def speaking(tmp_path: Path) -> ModelConfig:
    """A tiny model with a tokenizer, whose experts are computed one by one."""
    folder = speaking_model(tmp_path / "model")
    return ModelConfig(name="tiny", id=str(folder), exact=Exact.EAGER, dtype="float32")


@pytest.fixture
def sim() -> Iterator[SimDevices]:
    """Two simulated devices, on which nothing may race."""
    with simulated() as devices, torch.no_grad():
        yield devices


@pytest.fixture(params=["sim", pytest.param("gpu", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> Iterator[torch.device]:
    """The first device of its kind."""
    if request.param == "sim":
        request.getfixturevalue("sim")
        yield torch.device("sim", 0)
        return
    kind = find_accelerator()
    if kind is None:
        pytest.skip("NO ACCELERATOR: what a GPU computes is untested")
    with torch.no_grad():
        yield torch.device(kind.type, 0)
