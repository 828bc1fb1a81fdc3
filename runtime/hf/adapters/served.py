"""What a layer's experts module asks for its experts' parameters."""

from collections.abc import Iterator
from typing import Any, NoReturn, Protocol

from torch import Tensor

from runtime.errors import CheckpointError


class ExpertSource(Protocol):
    """The engine, as experts modules see it."""

    def ready(self, layer: int, wanted: list[int]) -> Iterator[tuple[int, dict[str, Tensor]]]:
        """The wanted experts, each when it is ready."""

    def hold(self, layer: int, expert: int) -> dict[str, Tensor]:
        """One expert's parameters, valid until the next expert of the model is asked for."""


class Served:
    """One layer of a source. Belongs to one loaded model: neither copied nor pickled with it."""

    def __init__(self, source: ExpertSource, layer: int):
        self._source = source
        self._layer = layer

    def ready(self, wanted: list[int]) -> Iterator[tuple[int, dict[str, Tensor]]]:
        """The wanted experts, ascending in `wanted`, each when it is ready."""
        return self._source.ready(self._layer, wanted)

    def hold(self, expert: int) -> dict[str, Tensor]:
        """The expert's parameters, valid until the next expert of the model is asked for."""
        return self._source.hold(self._layer, expert)

    def __deepcopy__(self, _memo: dict[int, Any]) -> NoReturn:
        raise CheckpointError(
            "this model's experts live in moecast's arena and are not copied with it; "
            "load the checkpoint a second time"
        )

    def __reduce_ex__(self, _protocol: object) -> NoReturn:
        raise CheckpointError(
            "this model's experts live in moecast's arena and are not pickled with it; "
            "copy the checkpoint that it was loaded from"
        )
