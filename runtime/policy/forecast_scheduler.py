"""Turns forecasts into prefetch requests: which experts, in which order."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from predictors.base import Forecast
from predictors.errors import MoecastError, unknown
from runtime.policy.adaptive_switch import AdaptiveSwitch
from runtime.policy.multi_device_cache import DeviceCaches
from runtime.policy.queue import find_prefetch_order

CANDIDATES = ("named", "all", "slots")
"""Values of `SystemConfig.candidates`."""

MAX_QUEUED = 32
"""Experts queued by one ranking of all layers: more than a link transfers until the next layer is
routed, when all are ranked anew."""


class ForecastScheduler:
    """Turns each forecast into low-priority transfers.

    Args:
        cache: Receives the requests; its system says which of the experts are requested
            (`SystemConfig.candidates`) and in which order.
        lookahead_layers: Layers, counted from the next to be routed, whose forecasts are used;
            None: all.
        adaptive_prefetch: Decides whether forecasts are used at all; None: always.
    """

    def __init__(
        self,
        cache: DeviceCaches,
        *,
        top_k: int,
        adaptive_prefetch: AdaptiveSwitch | None = None,
        lookahead_layers: int | None = None,
    ):
        self.cache = cache
        self._top_k = top_k
        self._num_layers = len(cache.counters)
        self._candidates = cache.system.candidates
        if self._candidates not in CANDIDATES:
            raise MoecastError(unknown("candidates", self._candidates, CANDIDATES))
        self._order = find_prefetch_order(cache.system.priority)
        self.adaptive_prefetch = adaptive_prefetch
        self._lookahead_layers = lookahead_layers

    @property
    def prefetching(self) -> bool:
        """Whether forecasts are used in this step."""
        return self.adaptive_prefetch is None or self.adaptive_prefetch.is_on

    def schedule(self, forecasts: Iterable[Forecast], layer_now: int) -> None:
        """Requests the experts of every forecast that is not late.

        They are those that the forecast names, the union of the tokens' top_k, or by the system's
        `candidates` others. A forecast for the layer that computes now is in time until its router
        has run.
        """
        timely: list[Forecast] = []
        cache = self.cache
        # Before the step's first layer, that one is the next to be routed.
        next_layer = max(0, layer_now)
        first_layer = max(layer_now, cache.layer_now + 1)
        for forecast in forecasts:
            layer = forecast.layer
            if layer < first_layer:
                continue
            if self._lookahead_layers is not None and (
                layer - next_layer + 1 > self._lookahead_layers
            ):
                continue
            cache.on_forecast(layer, forecast.probability_E)
            timely.append(forecast)
        if self._candidates == "named":
            for forecast in timely:
                experts, probabilities = forecast.ranked(self._top_k)
                cache.prefetch(forecast.layer, experts, probabilities)
        elif timely:
            self._prefetch_first(timely)

    def _prefetch_first(self, forecasts: Sequence[Forecast]) -> None:
        """Requests the experts of all the layers that come first in the system's order."""
        order_LE = np.stack([forecast.order_E for forecast in forecasts])
        ahead_L = np.array([forecast.layer - self.cache.layer_now for forecast in forecasts])
        key: Any = self._order.key  # of whole arrays at once
        key_LE = np.broadcast_to(key(order_LE, ahead_L[:, None], self._num_layers), order_LE.shape)
        ranked = np.argsort(key_LE, axis=None, kind="stable")
        num_forecast = int(np.count_nonzero(order_LE > 0))
        chosen: list[list[int]] = [[] for _ in forecasts]
        num_left = self.cache.num_slots if self._candidates == "slots" else num_forecast
        num_queued = 0
        owns, is_ready = self.cache.owns, self.cache.is_ready
        layers = [forecast.layer for forecast in forecasts]
        rows, experts_ranked = np.divmod(ranked[:num_forecast], order_LE.shape[1])
        for row, e in zip(rows.tolist(), experts_ranked.tolist(), strict=True):
            expert = layers[row], e
            if not owns(expert):
                continue
            if num_left == 0 or num_queued == MAX_QUEUED:
                break
            num_left -= 1
            if not is_ready(expert):
                num_queued += 1
                chosen[row].append(e)
        for forecast, experts in zip(forecasts, chosen, strict=True):
            probabilities = [float(forecast.order_E[e]) for e in experts]
            named = forecast.experts(self._top_k)
            self.cache.prefetch(forecast.layer, experts, probabilities, named=named)
