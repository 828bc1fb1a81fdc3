"""What a layer's experts module asks for its experts' parameters."""

from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor


class ExpertSource(Protocol):
    """The engine, as experts modules see it."""

    def ready(self, layer: int, wanted: list[int]) -> Iterator[tuple[int, dict[str, Tensor]]]:
        """The wanted experts, each when it is ready."""

    def hold(self, layer: int, expert: int) -> dict[str, Tensor]:
        """One expert's parameters, valid until the next expert of the model is asked for."""


class LayerExperts:
    """One layer of a source.

    Where experts lie on several devices, a module whose tokens do not travel to them has their
    parameters brought to `home`.

    Args:
        home: where the model computes, if experts may lie elsewhere.
    """

    def __init__(self, source: ExpertSource, layer: int, *, home: torch.device | None = None):
        self._source = source
        self._layer = layer
        self._home = home

    def ready(self, wanted: list[int]) -> Iterator[tuple[int, dict[str, Tensor]]]:
        """The wanted experts, ascending in `wanted`, each when it is ready."""
        for expert, weights in self.in_place(wanted):
            yield expert, self._brought(weights)

    def in_place(self, wanted: list[int]) -> Iterator[tuple[int, dict[str, Tensor]]]:
        """The same, on the device that each belongs to."""
        return self._source.ready(self._layer, wanted)

    def hold(self, expert: int) -> dict[str, Tensor]:
        """The expert's parameters, valid until the next expert of the model is asked for."""
        return self._brought(self._source.hold(self._layer, expert))

    def _brought(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        if self._home is None:
            return weights
        return {name: tensor.to(self._home) for name, tensor in weights.items()}
