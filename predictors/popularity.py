"""Popularity: the experts that the trace used most, the same for every token."""

from collections.abc import Mapping
from typing import Any, Self

import numpy as np

from predictors.base import Floats, Forecast, Forecasts, Ints, Predictor, Signal
from predictors.spec import ModelSpec
from predictors.tensors import read_tensors, write_tensors


class Popularity(Predictor):
    """Forecasts every layer at the start of the step. L layers, E experts, T tokens."""

    kind = "popularity"
    signals = frozenset({Signal.TOKENS})
    stateless = True

    def __init__(self, spec: ModelSpec, shares_LE: Floats):
        """`shares_LE[l, e]`: share of the trace's tokens that layer `l` routed to expert `e`."""
        super().__init__(spec)
        assert shares_LE.shape == (spec.num_layers, spec.num_experts)
        self._shares_LE = shares_LE.astype(np.float32)

    def begin_step(self, tokens_T: Ints, requests_T: Ints) -> Forecasts:  # noqa: ARG002
        # One row serves all tokens: a view, not T copies of it.
        shape = (len(tokens_T), self.spec.num_experts)
        return [
            Forecast(layer, np.broadcast_to(row, shape))
            for layer, row in enumerate(self._shares_LE)
        ]

    def files(self) -> dict[str, bytes]:
        return write_tensors({"shares": self._shares_LE})

    @classmethod
    def from_files(
        cls,
        spec: ModelSpec,
        files: Mapping[str, bytes],
        options: Mapping[str, Any],  # noqa: ARG003
    ) -> Self:
        shape = (spec.num_layers, spec.num_experts)
        return cls(spec, read_tensors(files, {"shares": shape}, kind=cls.kind)["shares"])
