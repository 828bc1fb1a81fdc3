"""What a served model's hooks and experts modules talk to."""

from collections.abc import Iterator
from typing import Protocol

from torch import Tensor

from predictors.base import Floats, Ints
from runtime.hf.adapters.base import ExpertSource
from runtime.hf.probes import EventListener


class Server(EventListener, ExpertSource, Protocol):
    """Hears a model's events and has its experts: an engine, or a group before it."""


class Front:
    """Passes everything on to `server`, which may be replaced between forward passes."""

    def __init__(self, server: Server):
        self.server = server

    # ---- a probes' listener

    def begin_step(self, tokens_T: Ints, requests_T: Ints) -> None:
        self.server.begin_step(tokens_T, requests_T)

    def layer_input(self, layer: int, hidden_TD: Floats) -> None:
        self.server.layer_input(layer, hidden_TD)

    def gate_input(self, layer: int, hidden_TD: Floats) -> None:
        self.server.gate_input(layer, hidden_TD)

    def routed(
        self, layer: int, experts_TK: Ints, logits_TE: Floats | None, weights_TK: Floats | None
    ) -> None:
        self.server.routed(layer, experts_TK, logits_TE, weights_TK)

    def end_step(self) -> None:
        self.server.end_step()

    # ---- an experts' source

    def ready(self, layer: int, wanted: list[int]) -> Iterator[tuple[int, dict[str, Tensor]]]:
        return self.server.ready(layer, wanted)

    def hold(self, layer: int, expert: int) -> dict[str, Tensor]:
        return self.server.hold(layer, expert)
