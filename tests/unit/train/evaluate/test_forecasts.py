"""Recorded forecasts against the predictors that gave them.

Shape suffixes: T tokens of the step, E experts.
"""

import dataclasses

import numpy as np
import pytest

from predictors.base import Forecast, Predictor, Signal
from runtime.config import SystemConfig
from runtime.sim.hardware import PredictorLatencies, TokenLatency
from runtime.sim.replay import replay
from runtime.sim.step import batch_steps
from tests.builders.simulated import toy_accelerator
from train.evaluate.forecasts import record_forecasts, routing_only
from train.nonlearned import FITS

LATENCIES = PredictorLatencies(kind="lazy", measured={"lazy": TokenLatency(one_us=1, more_us=1)})
MACHINE = toy_accelerator(
    kernel_seconds=1e-6, predictor_seconds=1e-6, chunk_bytes=(10_000, 10_000, 10_000),
    layer_bytes=100_000, predictor_latencies=LATENCIES,
)  # fmt: skip


class Lazy(Predictor):
    """Answers every event from a buffer, which the next event overwrites, unless it is to answer
    with copies."""

    kind = "lazy"
    signals = frozenset({Signal.TOKENS, Signal.LAYER_INPUT, Signal.GATE_INPUT, Signal.ROUTED})

    def __init__(self, spec, *, copies=False):
        super().__init__(spec)
        self.copies = copies
        self.scores_TE = np.zeros((1, spec.num_experts), np.float32)
        self.steps = 0

    def answer(self, layer):
        num_experts = self.spec.num_experts
        self.scores_TE[:] = np.arange(num_experts) == (7 * self.steps + layer) % num_experts
        scores_TE = self.scores_TE.copy() if self.copies else self.scores_TE
        return [Forecast(layer, scores_TE)] if layer < self.spec.num_layers else []

    def begin_step(self, tokens_T, requests_T):
        self.steps += 1
        return self.answer(0)

    def layer_input(self, layer, hidden_TD):
        assert hidden_TD.shape[1] == self.spec.hidden_size
        return self.answer(layer)

    def gate_input(self, layer, hidden_TD):
        return self.answer(layer + 1)

    def routed(self, layer, experts_TK, logits_TE):
        return self.answer(layer + 2)

    def count_input_rows(self, requests_T):
        return min(len(requests_T), 2)


@pytest.mark.parametrize("kind", ["eam-request", "expert-map", "correlation", "token", "lazy"])
@pytest.mark.parametrize("batch", [1, 2])
def test_replay__equals_that_of_the_live_predictor(trace, kind, batch):
    spec = trace.spec

    def made(**lazy):
        options = {"distance": 2} if kind == "expert-map" else {}
        return Lazy(spec, **lazy) if kind == "lazy" else FITS[kind](trace, **options)

    steps = list(batch_steps(trace.steps("held_out"), batch))
    light = [routing_only(step, spec.num_layers) for step in steps]
    recorded = record_forecasts(made(), steps)
    arguments = {"spec": spec, "system": SystemConfig(), "hardware": MACHINE}
    for slots in (8, 20):
        arguments["budget_slots"] = slots
        alive = replay(steps, made(copies=True), **arguments)
        played = replay(light, recorded.predictor(spec), **arguments)
        assert alive.total.predicted > 0
        assert dataclasses.asdict(played) == dataclasses.asdict(alive)
