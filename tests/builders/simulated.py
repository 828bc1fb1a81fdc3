"""Machines with round times and steps given by their routing, for replays worked out by hand."""

from collections.abc import Iterable
from typing import Any

import numpy as np

from predictors.base import Forecast, Predictor, Signal
from predictors.spec import ModelSpec
from runtime.sim.hardware import MeasuredHardware, RooflineHardware
from runtime.sim.step import ArrayStep


def toy_machine(**changes: Any) -> MeasuredHardware:
    """An expert comes in 6 s (three chunks); a layer takes 10 s, an expert 1 s a token, a
    prediction 3 s."""
    fields = {
        "name": "toy", "predictor_seconds": 3.0,
        "chunk_bytes": (1, 1, 1), "transfer_fixed": 0.0, "transfer_per_byte": 2.0,
        "layer_fixed": 10.0, "layer_per_token": 0.0, "expert_fixed": 0.0, "expert_per_token": 1.0,
    }  # fmt: skip
    return MeasuredHardware(**{**fields, **changes})


def toy_accelerator(**changes: Any) -> RooflineHardware:
    """Small experts, fast links; nothing takes long."""
    fields = {
        "name": "toy", "chunk_bytes": (100, 100, 100), "layer_bytes": 1_000,
        "link_bytes_per_second": 1e9, "memory_bytes_per_second": 1e12, "flops": 1e12,
        "link_latency_seconds": 0.0, "kernel_seconds": 0.0, "predictor_seconds": 0.0,
    }  # fmt: skip
    return RooflineHardware(**{**fields, **changes})


class Knows(Predictor):
    """Forecasts at the first gate that each token uses one expert of the next layer."""

    kind = "knows"
    signals = frozenset({Signal.GATE_INPUT})

    def __init__(self, spec: ModelSpec, expert: int, *, chance: float = 0.9):
        super().__init__(spec)
        self.expert, self.chance = expert, chance

    def gate_input(self, layer, hidden_TD):
        scores_TE = np.zeros((len(hidden_TD), self.spec.num_experts), np.float32)
        scores_TE[:, self.expert] = self.chance
        return () if layer else (Forecast(1, scores_TE),)


def routed_step(chosen: Any, requests: int | Iterable[int] = 0) -> ArrayStep:
    """A step whose `chosen[layer][token]` is an expert or several.

    `requests` are the request of all tokens, or that of each.
    """
    experts_LTK = np.array(chosen)
    if experts_LTK.ndim == 2:
        experts_LTK = experts_LTK[:, :, None]
    num_layers, num_tokens, _ = experts_LTK.shape
    requests_T = np.zeros(num_tokens, np.int64) + np.array(requests)
    gates = [(Signal.GATE_INPUT, layer) for layer in range(num_layers)]
    states = {gate: np.zeros((num_tokens, 1), np.float32) for gate in gates}
    return ArrayStep(np.zeros(num_tokens, np.int64), requests_T, experts_LTK, states)


def one_token(*experts: int, request: int = 0) -> ArrayStep:
    """A step of one token, given by its expert of each layer."""
    return routed_step([[e] for e in experts], request)
