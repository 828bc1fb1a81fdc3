"""What forecasts ask the link for, and in which order."""

import numpy as np

from predictors.base import Forecast
from runtime.policy.forecast_scheduler import ForecastScheduler
from runtime.presets import load_system
from tests.unit.runtime.policy.test_device_cache import drain, make_cache, once

SCORES = np.array([[0.9, 0.1, 0.8, 0.2, 0.7, 0.3]], np.float32)
BOTH = [Forecast(2, SCORES), Forecast(1, SCORES)]


def fetched(core, forecasts, *, top_k: int = 2, layer_now: int = 0) -> list[tuple[int, int]]:
    """(layer, expert) in the order in which the forecasts have them brought."""
    ForecastScheduler(core, top_k=top_k).schedule(forecasts, layer_now=layer_now)
    return list(dict.fromkeys(task.expert for task in drain(core)))


def core_after(layer: int, *experts: int, **switches):
    """Returns a core whose step has routed a layer."""
    core = make_cache(**switches)
    core.begin_step(np.array([0]))
    core.cancel(layer, core.request_routed(layer, once(experts)))
    return core


def test_forecast_scheduler__fetches_top_k_nearest_layer_first() -> None:
    assert fetched(make_cache(), BOTH) == [(1, 0), (1, 2), (2, 0), (2, 2)]


def test_forecast_scheduler__fetches_the_wanted_experts_only() -> None:
    core = make_cache(priority="probability-over-distance")
    assert fetched(core, [Forecast(1, SCORES, wanted=[5, 4, 0])]) == [(1, 0), (1, 4), (1, 5)]


def test_forecast_scheduler__follows_the_predictors_priority() -> None:
    near, far = forecast_of(1, 0.1, 0, 0.4, 0, 0, 0), forecast_of(2, 0.3, 0, 0.2, 0, 0, 0)
    core = make_cache(priority="probability")
    assert fetched(core, [near, far]) == [(1, 2), (2, 0), (2, 2), (1, 0)]


def test_forecast_scheduler__fmoes_priority_is_probability_over_distance() -> None:
    # .9 three layers ahead is .3, .4 one layer ahead is .4 (fMoE, section 4.5).
    far, near = forecast_of(2, 0.9, 0, 0, 0, 0, 0), forecast_of(0, 0.4, 0, 0, 0, 0, 0)
    core = make_cache(priority=load_system("fmoe").priority)
    assert fetched(core, [far, near], top_k=1, layer_now=-1) == [(0, 0), (2, 0)]


def test_forecast_scheduler__looks_ahead_from_the_next_routed_layer() -> None:
    every = [Forecast(layer, SCORES) for layer in range(3)]
    # The router of layer 0 has spoken where layer 1 is next.
    for now, ahead, layers in ((-1, 1, [0]), (-1, 2, [0, 1]), (1, 1, [1]), (1, None, [1, 2])):
        core = make_cache(lookahead_layers=ahead)
        found = fetched(core, every, top_k=1, layer_now=now)
        assert found == [(layer, 0) for layer in layers], (now, ahead)


def test_forecast_scheduler__drops_forecasts_of_routed_layers() -> None:
    # The predictor was given layer 0's event; its answer comes after layer 1 was routed.
    assert fetched(core_after(1, 0), BOTH) == [(2, 0), (2, 2)]


def forecast_of(layer: int, *priorities: float) -> Forecast:
    return Forecast(layer, SCORES, priority_E=np.array(priorities, np.float32))


NEAR, FAR = forecast_of(1, 0.1, 0, 0.4, 0, 0.2, 0), forecast_of(2, 0.6, 0.01, 0.2, 0, 0, 0)
"""With layer decay, of three layers: layer 1 counts two thirds, layer 2 one third."""


def test_forecast_scheduler__all_experts_of_all_layers_in_order() -> None:
    (priority,) = {load_system(f"moe-infinity-{of}").priority for of in ("request", "sequence")}
    core = core_after(0, priority=priority, candidates="all")
    order = [(1, 2), (2, 0), (1, 4), (1, 0), (2, 2), (2, 1)]
    # .27 .2 .13 .067 .067 .003; a priority of 0 is no forecast.
    assert fetched(core, [NEAR, FAR], top_k=1, layer_now=1) == order
    core.request_routed(1, once([]))
    assert core.counters[1].predicted == 1, "what a token would choose"


def test_forecast_scheduler__as_many_as_there_are_slots() -> None:
    switches = {"priority": "layer-decay", "candidates": "slots", "per_layer": False}
    core = core_after(0, slots=(4,), **switches)
    assert fetched(core, [NEAR, FAR], top_k=1, layer_now=1) == [(1, 2), (2, 0), (1, 4), (1, 0)]
    again = fetched(core, [NEAR, FAR], top_k=1, layer_now=1)
    assert again == [], "what is there counts among the slots"
