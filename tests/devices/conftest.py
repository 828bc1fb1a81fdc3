"""The devices that tests run on: a simulated one, and a real one with `-m gpu`."""

from collections.abc import Iterator

import pytest
import torch

from runtime.accelerator import find_accelerator
from tests.builders.sim_device.backend import simulated
from tests.builders.sim_device.streams import SimDevices
from tests.unit.runtime.conftest import folder

__all__ = ["device", "folder", "sim"]


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
