"""What a layer's experts module asks for its experts' parameters."""

from collections.abc import Iterator
from typing import Protocol

from torch import Tensor


class ExpertSource(Protocol):
    """The engine, as experts modules see it."""

    def ready(self, layer: int, wanted: list[int]) -> Iterator[tuple[int, dict[str, Tensor]]]:
        """The wanted experts, each when it is ready."""

    def hold(self, layer: int, expert: int) -> dict[str, Tensor]:
        """One expert's parameters, valid until the next expert of the model is asked for."""


class Served:
    """One layer of a source."""

    def __init__(self, source: ExpertSource, layer: int):
        self._source = source
        self._layer = layer

    def ready(self, wanted: list[int]) -> Iterator[tuple[int, dict[str, Tensor]]]:
        """The wanted experts, ascending in `wanted`, each when it is ready."""
        return self._source.ready(self._layer, wanted)

    def hold(self, expert: int) -> dict[str, Tensor]:
        """The expert's parameters, valid until the next expert of the model is asked for."""
        return self._source.hold(self._layer, expert)
