"""Recorded forecasts against the predictors that gave them.

Shape suffixes: T tokens of the step, E experts.
"""

import dataclasses

import numpy as np
import pytest

from predictors.base import Forecast, Predictor, Signal
from runtime.config import SystemConfig
from runtime.sim.hardware import RooflineHardware
from runtime.sim.replay import replay
from runtime.sim.step import batch_steps
from tests.builders.traces import make_spec, make_trace
from train.evaluate.forecasts import perfect_forecasts, record_forecasts, routing_only
from train.nonlearned import FITS

MACHINE = RooflineHardware(
    name="toy",
    link_bytes_per_second=1e9,
    link_latency_seconds=1e-6,
    memory_bytes_per_second=1e10,
    flops=1e12,
    kernel_seconds=1e-6,
    predictor_seconds=1e-6,
    chunk_bytes=(10_000, 10_000, 10_000),
    layer_bytes=100_000,
)


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
        self.scores_TE[:] = (7 * self.steps + layer) % self.spec.num_experts == np.arange(
            self.spec.num_experts
        )
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


@pytest.mark.parametrize("kind", ["eam-request", "expert-map", "correlation", "token", "lazy"])
@pytest.mark.parametrize("batch", [1, 2])
def test_replay__equals_that_of_the_live_predictor(tmp_path, kind, batch):
    trace = make_trace(tmp_path / "trace")
    spec = trace.spec

    def made(**lazy):
        options = {"distance": 2} if kind == "expert-map" else {}
        return Lazy(spec, **lazy) if kind == "lazy" else FITS[kind](trace, **options)

    steps = list(batch_steps(trace.steps("held_out"), batch))
    light = [routing_only(step, spec.num_layers) for step in steps]
    recorded = record_forecasts(made(), steps)
    for slots in (8, 20):
        arguments = {
            "spec": spec,
            "system": SystemConfig(),
            "hardware": MACHINE,
            "budget_slots": slots,
        }
        alive = replay(steps, made(copies=True), **arguments)
        played = replay(light, recorded.predictor(spec), **arguments)
        assert alive.total.predicted > 0
        assert dataclasses.asdict(played) == dataclasses.asdict(alive)


def test_at_distance__keeps_forecasts_of_one_distance(tmp_path):
    trace = make_trace(tmp_path / "trace")
    recorded = record_forecasts(Lazy(trace.spec), list(trace.steps("held_out"))[:2])
    for distance in range(4):
        player = recorded.at_distance(distance).predictor(trace.spec)
        for _ in range(2):
            # The beginning of a step is one layer before layer 0.
            assert len(player.begin_step(None, None)) == (distance == 1)
            for layer in range(trace.spec.num_layers):
                answers = [
                    one.layer - layer
                    for event in (player.layer_input, player.gate_input)
                    for one in event(layer, None)
                ] + [one.layer - layer for one in player.routed(layer, None, None)]
                inside = layer + distance < trace.spec.num_layers
                assert answers == [distance] * (inside and distance < 3)


def test_perfect_forecasts__are_the_routing_of_later_layers(tmp_path):
    spec = make_spec(num_layers=3)
    trace = make_trace(tmp_path / "trace", spec=spec)
    steps = list(trace.steps("held_out"))[:5]
    player = perfect_forecasts(steps, spec).predictor(spec)
    for step in steps:
        chosen = [set(step.experts(layer).ravel().tolist()) for layer in range(3)]
        first = player.begin_step(step.tokens_T, step.requests_T)
        assert [set(one.experts(spec.top_k)) for one in first] == chosen
        for layer in range(3):
            later = player.gate_input(layer, None)
            assert [one.layer for one in later] == list(range(layer + 1, 3))
            assert all(set(one.experts(spec.top_k)) == chosen[one.layer] for one in later)
