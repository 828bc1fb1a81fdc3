"""One forward pass of one request, as a trace replays it.

Shape suffixes: T tokens of the step, D hidden size, E experts, K top_k.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from collect.traces.layout import TraceSignal
from predictors.base import Floats, Ints


class Phase(IntEnum):
    """Value of the `phase` column."""

    PREFILL = 0
    DECODE = 1


@dataclass(frozen=True)
class Step:
    """The prompt of a request (T tokens), or one token that it generated (T = 1)."""

    phase: Phase
    request: int
    first_row: int
    """The step's rows are `first_row .. first_row + T`."""
    tokens_T: Ints
    read: Callable[[TraceSignal, int, int, int], NDArray]
    """`(signal, layer, first row, last row)` to the stored values."""

    @property
    def num_tokens(self) -> int:
        return len(self.tokens_T)

    @property
    def requests_T(self) -> Ints:
        return np.full(len(self.tokens_T), self.request, dtype=np.int64)

    def layer_input(self, layer: int) -> Floats:
        """`[T, D]`: normalised hidden state that enters the layer."""
        return self._values(TraceSignal.LAYER_INPUT, layer).astype(np.float32)

    def gate_input(self, layer: int) -> Floats:
        """`[T, D]`: what the router saw."""
        return self._values(TraceSignal.GATE_INPUT, layer).astype(np.float32)

    def logits(self, layer: int) -> Floats:
        """`[T, E]`: the router's output over all experts."""
        return self._values(TraceSignal.GATE_LOGITS, layer).astype(np.float32)

    def experts(self, layer: int) -> Ints:
        """`[T, K]`: the chosen experts, in the router's order."""
        return self._values(TraceSignal.EXPERTS, layer).astype(np.int64)

    def weights(self, layer: int) -> Floats:
        """`[T, K]`: the router's weights of the chosen experts."""
        return self._values(TraceSignal.WEIGHTS, layer).astype(np.float32)

    def _values(self, signal: TraceSignal, layer: int) -> NDArray:
        return self.read(signal, layer, self.first_row, self.first_row + len(self.tokens_T))
