"""Turns forecasts into prefetch requests: which experts, in which order."""

import numpy as np
from numpy.typing import NDArray

from predictors.base import ConsecutiveForecasts, Forecast, Forecasts, Ints
from predictors.errors import MoecastError, unknown
from runtime.policy.device_cache import DeviceCache
from runtime.policy.queue import find_prefetch_order, prefetch_key

CANDIDATES = ("named", "all", "slots")
"""Values of `SystemConfig.candidates`."""

Orders = NDArray[np.float64]

MAX_QUEUED = 32
"""Experts queued by one ranking of all layers: more than a link transfers until the next layer is
routed, when all are ranked anew."""


class ForecastScheduler:
    """Turns each forecast into low-priority transfers.

    Args:
        cache: Receives the requests; its system says which of the experts are requested
            (`SystemConfig.candidates`), in which order, and how far ahead.
        top_k: Experts that each token is routed to.
    """

    def __init__(self, cache: DeviceCache, *, top_k: int):
        self.cache = cache
        self._top_k = top_k
        self._num_layers = len(cache.counters)
        candidates = cache.system.candidates
        if candidates not in CANDIDATES:
            raise MoecastError(unknown("candidates", candidates, CANDIDATES))
        self._is_named, self._is_bounded = candidates == "named", candidates == "slots"
        self._order = find_prefetch_order(cache.system.priority)
        self._lookahead_layers = cache.system.lookahead_layers

    def schedule(self, forecasts: Forecasts, layer_now: int) -> None:
        """Requests the experts of every forecast that is not late.

        They are those that the forecast names, the union of the tokens' top_k, or by the system's
        `candidates` others. A forecast for the layer that computes now is in time until its router
        has run.
        """
        cache, top_k = self.cache, self._top_k
        # Before the step's first layer, that one is the next to be routed.
        first_layer = max(layer_now, cache.layer_now + 1)
        end_layer = self._num_layers
        if self._lookahead_layers is not None:
            end_layer = max(0, layer_now) + self._lookahead_layers
        if self._is_named and type(forecasts) is ConsecutiveForecasts:
            token = forecasts.ranked_token(top_k)
            if token is not None:
                probability_HE, ranked = token
                first = forecasts.first_layer
                layers = range(max(first, first_layer), min(first + len(ranked), end_layer))
                for layer in layers:
                    probability_E = probability_HE[layer - first]
                    cache.on_forecast(layer, probability_E, probability_E)
                for layer in layers:
                    cache.prefetch(layer, *ranked[layer - first])
                return
        timely = [one for one in forecasts if first_layer <= one.layer < end_layer]
        for forecast in timely:
            cache.on_forecast(forecast.layer, forecast.probability_E, forecast.order_E)
        if self._is_named:
            for forecast in timely:
                experts, probabilities = forecast.ranked(top_k)
                cache.prefetch(forecast.layer, experts, probabilities)
        elif timely:
            self._prefetch_first(timely)

    def _prefetch_first(self, forecasts: list[Forecast]) -> None:
        """Requests the experts of all the layers that come first in the system's order."""
        cache = self.cache
        order_LE = np.array([forecast.order_E for forecast in forecasts], np.float64)
        layers = [forecast.layer for forecast in forecasts]
        ahead_L, key_LE = np.array(layers) - cache.layer_now, np.empty(order_LE.shape)
        self._write_keys(order_LE, ahead_L, key_LE)
        num_forecast, num_experts = int(np.count_nonzero(order_LE > 0)), order_LE.shape[1]
        ranked = np.argsort(key_LE, axis=None, kind="stable")[:num_forecast].tolist()
        chosen: list[list[int]] = [[] for _ in forecasts]
        num_left = cache.num_slots if self._is_bounded else num_forecast
        num_queued = 0
        for place in ranked:
            row, e = place // num_experts, place % num_experts
            expert = layers[row], e
            if not cache.owns(expert):
                continue
            if num_left == 0 or num_queued == MAX_QUEUED:
                break
            num_left -= 1
            if not cache.is_ready(expert):
                num_queued += 1
                chosen[row].append(e)
        for row, forecast in enumerate(forecasts):
            probabilities = [order_LE.item(row, e) for e in chosen[row]]
            named = forecast.experts(self._top_k)
            cache.prefetch(layers[row], chosen[row], probabilities, named=named)

    def _write_keys(self, order_LE: Orders, ahead_L: Ints, key_LE: Orders) -> None:
        """Writes each expert's key, one by one, as compiled code does best."""
        order, num_layers = self._order, self._num_layers
        for row in range(order_LE.shape[0]):
            for e in range(order_LE.shape[1]):
                key_LE[row, e] = prefetch_key(order, order_LE[row, e], ahead_L[row], num_layers)
