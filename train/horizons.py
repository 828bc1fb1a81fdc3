"""Accuracy by distance: what a forecast is worth depends on how long before its layer it comes."""

from typing import Any

from collect.traces import Trace
from predictors.base import Predictor, Signal
from predictors.metrics import LayerScore, total
from train.accuracy import Pending, phased

ENTRY = "entry"
"""What is forecast when the step begins or from the first layer's input."""


def by_horizon(predictor: Predictor, trace: Trace, split: str = "held_out") -> dict[str, Any]:
    """For each horizon the accuracy of every layer (null: not forecast), their mean, the worst.

    Horizon h: from the gate input of layer l to layer l + h; 0: from a layer's own input. All
    forecasts count, also those that a later one replaces.
    """
    spec, signals = predictor.spec, predictor.signals
    pending: dict[str, dict[int, Pending]] = {}
    for step, phases_T in phased(trace, split, grouped=predictor.stateless):
        answers = [(ENTRY, one) for one in predictor.begin_step(step.tokens_T, step.requests_T)]
        for layer in range(spec.num_layers):
            if Signal.LAYER_INPUT in signals:
                for one in predictor.layer_input(layer, step.layer_input(layer)):
                    # The first layer's own input is all that its first forecasts can have.
                    answers.append((f"{one.layer - layer}" if layer else ENTRY, one))
            if Signal.GATE_INPUT in signals:
                for one in predictor.gate_input(layer, step.gate_input(layer)):
                    answers.append((f"{one.layer - layer}", one))
            if Signal.ROUTED in signals:
                logits = step.logits(layer) if Signal.LOGITS in signals else None
                for one in predictor.routed(layer, step.experts(layer), logits):
                    answers.append((f"{one.layer - layer}", one))
        predictor.end_step()
        for name, one in answers:
            layers = pending.setdefault(name, {})
            waiting = layers.setdefault(one.layer, Pending(LayerScore(spec.top_k, extras=())))
            waiting.add(one.scores_TE, step.experts(one.layer), phases_T, None)
    for layers in pending.values():
        for waiting in layers.values():
            waiting.settle()
    return {name: table(pending[name], spec.num_layers) for name in sorted(pending)}


def table(pending: dict[int, Pending], num_layers: int) -> dict[str, Any]:
    found = {layer: one.score.overall for layer, one in pending.items()}
    values = [found[layer].value if layer in found else None for layer in range(num_layers)]
    return {
        "accuracy": values,
        "mean_accuracy": total(list(found.values())).value,
        "worst_layer_accuracy": min(value for value in values if value is not None),
        "calibration_error": [
            pending[layer].score.calibration.error if layer in pending else None
            for layer in range(num_layers)
        ],
    }
