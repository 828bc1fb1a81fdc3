"""Scores predictors on held-out requests through their serving interface.

Shape suffixes: T tokens, D hidden, E experts, K top_k, L layers.
"""

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import numpy as np

from collect.traces import Trace, TraceSignal
from collect.traces.reader import TraceStep
from predictors.base import Floats, Forecast, Ints, Predictor
from predictors.metrics import (
    CalibrationBins,
    LayerScore,
    Phase,
    match_chosen_TK,
    name_distance,
    sum_means,
)
from runtime.sim.step import RecordedStep, replay_step

BLOCK_TOKENS = 4_096
"""Tokens scored at once where their grouping does not matter: 1 MB of scores at 60 experts."""


def blocks(trace: Trace, split: str | None) -> Iterator[TraceStep]:
    """Yield the split's tokens in the trace's order, `BLOCK_TOKENS` at a time."""
    rows = trace.rows(split)
    for first in range(0, len(rows), BLOCK_TOKENS):
        yield TraceStep(trace, rows[first : first + BLOCK_TOKENS])


def scored_steps(predictor: Predictor, trace: Trace, split: str | None) -> Iterator[TraceStep]:
    """Return the split's tokens in large blocks or, where it matters, step by step."""
    return blocks(trace, split) if predictor.stateless else trace.steps(split)


def replay_forecasts(predictor: Predictor, step: RecordedStep) -> Iterator[Forecast]:
    """Show a predictor one step and yield its forecasts in the order of the model's events."""
    for event in replay_step(predictor, step, num_layers=predictor.spec.num_layers):
        yield from event.forecasts


class PendingScores:
    """Forecasts of one layer that are scored together, because one token at a time is slow."""

    def __init__(self, score: LayerScore):
        self.score = score
        self._rows: list[tuple[Floats, Ints, Ints, Floats | None]] = []
        self._num_tokens = 0

    def add(
        self, scores_TE: Floats, chosen_TK: Ints, phases_T: Ints, weights_TK: Floats | None
    ) -> None:
        # A copy: what a predictor answers with may be its own memory, and change.
        self._rows.append((np.array(scores_TE), chosen_TK, phases_T, weights_TK))
        self._num_tokens += len(chosen_TK)
        if self._num_tokens >= BLOCK_TOKENS:
            self.settle()

    def settle(self) -> LayerScore:
        """Return the score with all that was added."""
        if self._rows:
            scores, chosen, phases, weights = zip(*self._rows, strict=True)
            self.score.add(
                np.concatenate(scores),
                np.concatenate(chosen),
                phases_T=np.concatenate(phases),
                weights_TK=None if weights[0] is None else np.concatenate(weights),
            )
            self._rows.clear()
            self._num_tokens = 0
        return self.score


class RequestAccuracy:
    """Accuracy of layers, summed by request: tokens of one request are alike."""

    def __init__(self, num_requests: int, *, num_layers: int):
        self._hits_LR = np.zeros((num_layers, num_requests))
        self._chosen_LR = np.zeros((num_layers, num_requests))

    def add(self, forecast: Forecast, chosen_TK: Ints, requests_T: Ints) -> None:
        top_k = chosen_TK.shape[1]
        hits_T = match_chosen_TK(forecast.chosen_TK(top_k), chosen_TK).sum(axis=1)
        np.add.at(self._hits_LR[forecast.layer], requests_T, hits_T)
        # The id E is no choice.
        made_T = (chosen_TK < forecast.scores_TE.shape[1]).sum(axis=1)
        np.add.at(self._chosen_LR[forecast.layer], requests_T, made_T)

    def standard_error(self, layer: int | None = None) -> float | None:
        """Return the standard error of a layer's accuracy, or of the mean over all layers.

        It follows from differences between requests, as that of a ratio of sums with requests as
        clusters; None for fewer than two requests.
        """
        layers = slice(None) if layer is None else slice(layer, layer + 1)
        hits_R, chosen_R = self._hits_LR[layers].sum(axis=0), self._chosen_LR[layers].sum(axis=0)
        is_used_R = chosen_R > 0
        hits_R, chosen_R = hits_R[is_used_R], chosen_R[is_used_R]
        num_requests = len(hits_R)
        if num_requests < 2:
            return None
        residual_R = hits_R - chosen_R * (hits_R.sum() / chosen_R.sum())
        variance = num_requests / (num_requests - 1) * (residual_R**2).sum() / chosen_R.sum() ** 2
        return float(np.sqrt(variance))


def score_layers(
    predictor: Predictor,
    trace: Trace,
    split: str | None = "held_out",
    *,
    by_request: RequestAccuracy | None = None,
) -> list[LayerScore]:
    """Return a LayerScore for each target layer, empty for one that was never forecast.

    The same forecasts are added to `by_request`, if it is given.

    A layer forecast several times in a step is scored on the last forecast before its router. A
    predictor that learns while it serves is scored on each step before it learns from it.
    """
    spec = predictor.spec
    weighted = TraceSignal.WEIGHTS in trace.signals
    pending = [PendingScores(LayerScore(spec.top_k)) for _ in range(spec.num_layers)]
    for step in scored_steps(predictor, trace, split):
        last = {forecast.layer: forecast for forecast in replay_forecasts(predictor, step)}
        for layer, forecast in last.items():
            weights_TK = step.weights(layer) if weighted else None
            pending[layer].add(forecast.scores_TE, step.experts(layer), step.phases_T, weights_TK)
            if by_request is not None:
                by_request.add(forecast, step.experts(layer), step.requests_T)
    return [waiting.settle() for waiting in pending]


def layer_figures(scores: list[LayerScore]) -> dict[str, Any]:
    """Return the accuracy per layer, its mean and least, the error; None: not forecast."""
    accuracy = [score.overall.value for score in scores]
    return {
        "accuracy": accuracy,
        "mean_accuracy": sum_means([score.overall for score in scores]).value,
        "worst_layer_accuracy": min((one for one in accuracy if one is not None), default=None),
        "calibration_error": [score.calibration.error for score in scores],
    }


def accuracy_table(scores: list[LayerScore]) -> dict[str, Any]:
    """Return all figures per layer and over forecast layers; None: not forecast."""
    extras = scores[0].extras
    return {
        **layer_figures(scores),
        "accuracy_prefill": [score.accuracy[Phase.PREFILL].value for score in scores],
        "accuracy_decode": [score.accuracy[Phase.DECODE].value for score in scores],
        "gate_mass_recall": [score.gate_mass.value for score in scores],
        **{f"recall_plus_{m}": [score.recall[m].value for score in scores] for m in extras},
        "calibration": sum((score.calibration for score in scores), CalibrationBins()).as_dict(),
        "tokens": int(max(score.overall.count / score.top_k for score in scores)),
    }


def measure_horizons(predictor: Predictor, trace: Trace) -> dict[str, Any]:
    """Return for each horizon the accuracy of every layer (None: not forecast), mean and worst.

    Horizon h: from the gate input of layer l to layer l + h; 0: from a layer's own input. All
    forecasts count, also those that a later one replaces.
    """
    spec = predictor.spec
    pending: defaultdict[str, list[PendingScores]] = defaultdict(
        lambda: [PendingScores(LayerScore(spec.top_k, extras=())) for _ in range(spec.num_layers)]
    )
    for step in scored_steps(predictor, trace, "held_out"):
        for event in replay_step(predictor, step, num_layers=spec.num_layers):
            for one in event.forecasts:
                waiting = pending[name_distance(event.signal, event.layer, one.layer)][one.layer]
                waiting.add(one.scores_TE, step.experts(one.layer), step.phases_T, None)
    return {
        name: layer_figures([waiting.settle() for waiting in layers])
        for name, layers in sorted(pending.items())
    }
