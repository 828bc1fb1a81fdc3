"""From forecasts to what the link is asked for: which experts, how urgent."""

from collections.abc import Callable, Iterable

from predictors.base import Forecast
from predictors.errors import MoecastError, unknown
from runtime.policy.prefetcher import Prefetcher

Urgency = Callable[[float, int], float]
"""`(probability, layers ahead) -> urgency`; the smaller, the sooner."""


def nearest_layer_first(probability: float, distance: int) -> float:
    """promoe: layers in the order in which they come, within a layer the likelier first."""
    return distance - probability


def probability_over_distance(probability: float, distance: int) -> float:
    """fmoe 4.4: priority `p / (l - l_now)`."""
    return -probability / max(1, distance)


URGENCIES: dict[str, Urgency] = {
    "nearest-layer": nearest_layer_first,
    "probability-over-distance": probability_over_distance,
}


def urgency(name: str) -> Urgency:
    """A system's priority function, by name."""
    if name not in URGENCIES:
        raise MoecastError(unknown("priority function", name, URGENCIES))
    return URGENCIES[name]


class Planner:
    """Turns each forecast into low-priority transfers; knows which layer computes now."""

    def __init__(self, prefetcher: Prefetcher, *, top_k: int, urgency: Urgency):
        self._prefetcher = prefetcher
        self._top_k = top_k
        self._urgency = urgency

    def plan(self, forecasts: Iterable[Forecast], *, layer_now: int) -> None:
        """Asks for the union of the tokens' top_k experts of every forecast that is not late.

        A forecast for the layer that computes now is in time until its router speaks.
        """
        for forecast in forecasts:
            distance = forecast.layer - layer_now
            if distance < 0:
                continue
            experts = forecast.experts(self._top_k)
            probability_E = forecast.probability_E
            urgent = [self._urgency(float(probability_E[e]), distance) for e in experts]
            self._prefetcher.predicted(forecast.layer, experts, urgent)
