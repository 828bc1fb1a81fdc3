"""Accuracy by the distance between a forecast and its layer."""

from typing import Any

from collect.traces import Trace
from predictors.base import Floats, Forecast, Forecasts, Ints, Predictor, Signal
from predictors.metrics import LayerScore, sum_means
from runtime.sim.step import StepEvent, replay_step
from train.accuracy import PendingScores, steps_with_phases

ENTRY = "entry"
"""Name of the distance of forecasts at a step's start or from the first layer's input."""


class HorizonPredictor(Predictor):
    """Wraps a predictor and passes on its forecasts at one distance only.

    A replay with it shows the value of that distance. The wrapped predictor must serve nothing
    else meanwhile.
    """

    def __init__(self, whole: Predictor, horizon: int):
        super().__init__(whole.spec)
        self._whole, self._horizon = whole, horizon
        # What the other one's class says, this one's object says.
        self.signals = whole.signals  # type: ignore[misc]
        self.stateless = whole.stateless  # type: ignore[misc]

    def begin_step(self, tokens_T: Ints, requests_T: Ints) -> Forecasts:
        self._whole.begin_step(tokens_T, requests_T)
        return ()

    def layer_input(self, layer: int, hidden_TD: Floats) -> Forecasts:
        found = self._kept(layer, self._whole.layer_input(layer, hidden_TD))
        return found if layer else ()

    def gate_input(self, layer: int, hidden_TD: Floats) -> Forecasts:
        return self._kept(layer, self._whole.gate_input(layer, hidden_TD))

    def routed(self, layer: int, experts_TK: Ints, logits_TE: Floats | None) -> Forecasts:
        return self._kept(layer, self._whole.routed(layer, experts_TK, logits_TE))

    def end_step(self) -> None:
        self._whole.end_step()

    def _kept(self, layer: int, found: Forecasts) -> Forecasts:
        return [one for one in found if one.layer - layer == self._horizon]


def measure_horizons(predictor: Predictor, trace: Trace, split: str = "held_out") -> dict[str, Any]:
    """Return for each horizon the accuracy of every layer (None: not forecast), mean and worst.

    Horizon h: from the gate input of layer l to layer l + h; 0: from a layer's own input. All
    forecasts count, also those that a later one replaces.
    """
    spec = predictor.spec
    pending: dict[str, dict[int, PendingScores]] = {}
    for step, phases_T in steps_with_phases(trace, split, grouped=predictor.stateless):
        answers = [
            (distance(event, forecast), forecast)
            for event in replay_step(predictor, step, num_layers=spec.num_layers)
            for forecast in event.forecasts
        ]
        for name, one in answers:
            layers = pending.setdefault(name, {})
            waiting = layers.setdefault(one.layer, PendingScores(LayerScore(spec.top_k, extras=())))
            waiting.add(one.scores_TE, step.experts(one.layer), phases_T, None)
    for layers in pending.values():
        for waiting in layers.values():
            waiting.settle()
    return {name: horizon_table(pending[name], spec.num_layers) for name in sorted(pending)}


def distance(event: StepEvent, forecast: Forecast) -> str:
    """Return the number of layers that a forecast looks ahead, or `ENTRY`."""
    # The input of the first layer is all that its first forecasts can have.
    if event.layer < 0 or (event.signal is Signal.LAYER_INPUT and event.layer == 0):
        return ENTRY
    return f"{forecast.layer - event.layer}"


def horizon_table(pending: dict[int, PendingScores], num_layers: int) -> dict[str, Any]:
    found = {layer: one.score.overall for layer, one in pending.items()}
    values = [found[layer].value if layer in found else None for layer in range(num_layers)]
    return {
        "accuracy": values,
        "mean_accuracy": sum_means(list(found.values())).value,
        "worst_layer_accuracy": min(value for value in values if value is not None),
        "calibration_error": [
            pending[layer].score.calibration.error if layer in pending else None
            for layer in range(num_layers)
        ],
    }
