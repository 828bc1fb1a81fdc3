"""Cold start and drift of the predictors that learn while they serve."""

from collections.abc import Iterable
from typing import Any

from collect.traces import Trace
from collect.traces.reader import TraceStep
from predictors.base import Predictor
from predictors.correlation import CorrelationPredictor
from predictors.eam.request import EamRequestPredictor
from predictors.eam.sequence import EamSequencePredictor
from predictors.expert_map import ExpertMapPredictor
from predictors.metrics import LayerScore, sum_means
from runtime.sim.step import first_request
from train.accuracy import PendingScores, reload_predictor, replay_forecasts

MARKS = (1, 2, 5, 10, 20, 50, 100, 200, 400)
"""Numbers of served requests at which the accuracy since the mark before is reported."""

LEARNERS = EamSequencePredictor | EamRequestPredictor | ExpertMapPredictor | CorrelationPredictor
"""Predictors that learn from the requests that they serve."""


def measure_drift(predictor: LEARNERS, trace: Trace, shifted: Trace | None) -> dict[str, Any]:
    """Measure accuracy against the number of requests served.

    An empty predictor serves the training requests. The fitted one serves the requests of another
    distribution, with and without learning from them; null without such a trace.
    """
    options = predictor.options()
    cold = type(predictor).empty(predictor.spec, **{**options, "learning": True})
    report: dict[str, Any] = {
        "cold_start": accuracy_curve(cold, trace.steps("train")),
        "shifted": None,
    }
    if shifted is not None:
        report["shifted"] = {
            name: accuracy_curve(reload_predictor(predictor, learning=learning), shifted.steps())
            for name, learning in (("learning", True), ("frozen", False))
        }
    return report


def accuracy_curve(predictor: Predictor, steps: Iterable[TraceStep]) -> list[dict[str, Any]]:
    """Return the accuracy over the requests between two marks; None where nothing was forecast."""
    points: list[dict[str, Any]] = []
    pending = _pending(predictor)
    seen: set[int] = set()
    marks = iter(MARKS)
    mark = next(marks)
    for step in steps:
        request = first_request(step)
        if request not in seen and len(seen) == mark:
            points.append(_point(pending, len(seen)))
            pending = _pending(predictor)
            following = next(marks, None)
            if following is None:
                return points
            mark = following
        seen.add(request)
        last = {forecast.layer: forecast for forecast in replay_forecasts(predictor, step)}
        for layer, forecast in last.items():
            pending[layer].add(forecast.scores_TE, step.experts(layer), step.phases_T, None)
    if seen:
        points.append(_point(pending, len(seen)))
    return points


def _pending(predictor: Predictor) -> list[PendingScores]:
    spec = predictor.spec
    return [PendingScores(LayerScore(spec.top_k, extras=())) for _ in range(spec.num_layers)]


def _point(pending: list[PendingScores], num_requests: int) -> dict[str, Any]:
    for scores in pending:
        scores.settle()
    accuracy = sum_means([scores.score.overall for scores in pending]).value
    return {"requests": num_requests, "accuracy": accuracy}
