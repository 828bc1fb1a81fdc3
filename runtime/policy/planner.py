"""From forecasts to what the link is asked for: which experts, how urgent, how many bytes."""

from collections.abc import Callable, Iterable

from predictors.base import Forecast
from predictors.errors import MoecastError, unknown
from runtime.policy.governor import Governor
from runtime.policy.prefetcher import Prefetcher

Urgency = Callable[[float, int], float]
"""`(probability, layers ahead) -> urgency`; the smaller, the sooner."""


def nearest_layer_first(probability: float, distance: int) -> float:
    """promoe: layers in the order in which they come, within a layer the likelier first."""
    return distance - probability


def likeliest_first(probability: float, distance: int) -> float:  # noqa: ARG001
    """moe-infinity-request table 4 before layer proximity: the likelier, wherever it is."""
    return -probability


def probability_over_distance(probability: float, distance: int) -> float:
    """Priority of fMoE, section 4.4: `p / (l - l_now)`."""
    return -probability / max(1, distance)


URGENCIES: dict[str, Urgency] = {
    "nearest-layer": nearest_layer_first,
    "probability": likeliest_first,
    "probability-over-distance": probability_over_distance,
}


def urgency(name: str) -> Urgency:
    """A system's priority function, by name."""
    if name not in URGENCIES:
        raise MoecastError(unknown("priority function", name, URGENCIES))
    return URGENCIES[name]


class Planner:
    """Turns each forecast into low-priority transfers; knows which layer computes now.

    Args:
        reach: layers, from the next to be routed on, whose forecasts are taken; None: all.
        predictors_order: urgency is the forecast's own where it has one.
        governor: says whether forecasts are wanted at all; None: always.
    """

    def __init__(
        self,
        prefetcher: Prefetcher,
        *,
        top_k: int,
        urgency: Urgency,
        governor: Governor | None = None,
        reach: int | None = None,
        predictors_order: bool = True,
    ):
        self._prefetcher = prefetcher
        self._top_k = top_k
        self._urgency = urgency
        self.governor = governor
        self._reach = reach
        self._predictors_order = predictors_order

    def plan(self, forecasts: Iterable[Forecast], *, layer_now: int) -> None:
        """Asks for the experts of every forecast that is not late: those it names, or the union
        of the tokens' top_k; in the order that it defines, or in that of the system.

        A forecast for the layer that computes now is in time until its router speaks.
        """
        for forecast in forecasts:
            distance = forecast.layer - layer_now
            # Before the step's first layer, that one is the next to be routed.
            place = forecast.layer - max(0, layer_now) + 1
            if distance < 0 or (self._reach is not None and place > self._reach):
                continue
            experts = forecast.experts(self._top_k)
            probability_E = forecast.probability_E
            if self._predictors_order and forecast.priority_E is not None:
                urgent = [-float(forecast.priority_E[e]) for e in experts]
            else:
                urgent = [self._urgency(float(probability_E[e]), distance) for e in experts]
            self._prefetcher.forecast(forecast.layer, probability_E.tolist())
            self._prefetcher.predicted(forecast.layer, experts, urgent)
