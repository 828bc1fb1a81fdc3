"""Receivers of probes' events."""

from typing import Any


class ProbeLog:
    """Keeps the name, the layer (-1 outside of layers) and the arrays of every event."""

    def __init__(self) -> None:
        self.events: list[tuple[str, int, list[Any]]] = []

    def of(self, name: str, layer: int = -1) -> list[list[Any]]:
        """The arrays of each event of a name and layer."""
        return [arrays for *where, arrays in self.events if where == [name, layer]]

    def chosen(self) -> dict[int, list[Any]]:
        """The experts of each event of routing, by layer."""
        found: dict[int, list[Any]] = {}
        for name, layer, arrays in self.events:
            if name == "routed":
                found.setdefault(layer, []).append(arrays[0])
        return found

    def _keep(self, name: str, layer: int, *arrays: Any) -> None:
        copies = [None if array is None else array.copy() for array in arrays]
        self.events.append((name, layer, copies))

    def begin_step(self, tokens_T: Any, requests_T: Any) -> None:
        self._keep("begin_step", -1, tokens_T, requests_T)

    def layer_input(self, layer: int, hidden_TD: Any) -> None:
        self._keep("layer_input", layer, hidden_TD)

    def gate_input(self, layer: int, hidden_TD: Any) -> None:
        self._keep("gate_input", layer, hidden_TD)

    def routed(self, layer: int, experts_TK: Any, logits_TE: Any = None, weights_TK=None) -> None:
        self._keep("routed", layer, experts_TK, logits_TE, weights_TK)

    def end_step(self) -> None:
        self._keep("end_step", -1)
