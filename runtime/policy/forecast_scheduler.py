"""Turns forecasts into prefetch requests: which experts, in which order."""

from collections.abc import Callable, Iterable

from predictors.base import Forecast
from predictors.errors import MoecastError, unknown
from runtime.policy.adaptive_prefetch import AdaptivePrefetch
from runtime.policy.multi_device_cache import DeviceCaches

PriorityFunction = Callable[[float, int], float]
"""`(probability, layers ahead) -> priority`; the smallest is fetched first."""


PRIORITY_FUNCTIONS: dict[str, PriorityFunction] = {
    # By layer, then by probability (ProMoE, section 4.3).
    "nearest-layer": lambda probability, distance: distance - probability,
    # MoE-Infinity (request level), table 4, no layer proximity.
    "probability": lambda probability, _: -probability,
    # By `p / (l - l_now)`, largest first (fMoE, section 4.4).
    "probability-over-distance": lambda probability, distance: -probability / max(1, distance),
}


class ForecastScheduler:
    """Turns each forecast into low-priority transfers.

    Args:
        priority: Key of `PRIORITY_FUNCTIONS`.
        lookahead_layers: Layers, counted from the next to be routed, whose forecasts are used;
            None: all.
        predictor_priority: Fetch in the order of the forecast's own `priority_E`, if it has one.
        adaptive_prefetch: Decides whether forecasts are used at all; None: always.

    Raises:
        MoecastError: There is no function `priority`.
    """

    def __init__(
        self,
        cache: DeviceCaches,
        *,
        top_k: int,
        priority: str,
        adaptive_prefetch: AdaptivePrefetch | None = None,
        lookahead_layers: int | None = None,
        predictor_priority: bool = True,
    ):
        self.cache = cache
        self._top_k = top_k
        if priority not in PRIORITY_FUNCTIONS:
            raise MoecastError(unknown("priority function", priority, PRIORITY_FUNCTIONS))
        self._priority = PRIORITY_FUNCTIONS[priority]
        self.adaptive_prefetch = adaptive_prefetch
        self._lookahead_layers = lookahead_layers
        self._predictor_priority = predictor_priority

    @property
    def prefetching(self) -> bool:
        """Whether forecasts are used in this step."""
        return self.adaptive_prefetch is None or self.adaptive_prefetch.prefetching

    def schedule(self, forecasts: Iterable[Forecast], *, layer_now: int) -> None:
        """Requests the experts of every forecast that is not late.

        They are those that the forecast names, or the union of the tokens' top_k. A forecast for
        the layer that computes now is in time until its router has run.
        """
        for forecast in forecasts:
            distance = forecast.layer - layer_now
            # Before the step's first layer, that one is the next to be routed.
            layers_ahead = forecast.layer - max(0, layer_now) + 1
            if distance < 0:
                continue
            if self._lookahead_layers is not None and layers_ahead > self._lookahead_layers:
                continue
            experts = forecast.experts(self._top_k)
            probability_E = forecast.probability_E
            if self._predictor_priority and forecast.priority_E is not None:
                priorities = [-float(forecast.priority_E[e]) for e in experts]
            else:
                priorities = [self._priority(float(probability_E[e]), distance) for e in experts]
            self.cache.on_forecast(forecast.layer, probability_E.tolist())
            self.cache.prefetch(forecast.layer, experts, priorities)
