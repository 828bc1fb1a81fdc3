"""What forecasts ask the link for, and in which order."""

import numpy as np

from predictors.base import Forecast
from runtime.policy.device_cache import DeviceCache
from runtime.policy.forecast_scheduler import ForecastScheduler
from tests.unit.runtime.policy.test_device_cache import drain, make_cache

SCORES = np.array([[0.9, 0.1, 0.8, 0.2, 0.7, 0.3]], np.float32)


def fetched(core: DeviceCache) -> list[tuple[int, int]]:
    """(layer, expert) in the order in which they are brought."""
    return list(dict.fromkeys(task.expert for task in drain(core)))


def test_forecast_scheduler__fetches_top_k_nearest_layer_first() -> None:
    core = make_cache()
    scheduler = ForecastScheduler(core, top_k=2, priority="nearest-layer")
    scheduler.schedule([Forecast(2, SCORES), Forecast(1, SCORES)], layer_now=0)
    assert fetched(core) == [(1, 0), (1, 2), (2, 0), (2, 2)]


def test_forecast_scheduler__fetches_the_wanted_experts_only() -> None:
    core = make_cache()
    scheduler = ForecastScheduler(core, top_k=2, priority="probability-over-distance")
    scheduler.schedule([Forecast(1, SCORES, wanted=[5, 4, 0])], layer_now=0)
    assert fetched(core) == [(1, 0), (1, 4), (1, 5)]


def test_forecast_scheduler__follows_the_predictors_priority() -> None:
    core = make_cache()
    near = Forecast(1, SCORES, priority_E=np.array([0.1, 0, 0.4, 0, 0, 0], np.float32))
    far = Forecast(2, SCORES, priority_E=np.array([0.3, 0, 0.2, 0, 0, 0], np.float32))
    ForecastScheduler(core, top_k=2, priority="nearest-layer").schedule([near, far], layer_now=0)
    assert fetched(core) == [(1, 2), (2, 0), (2, 2), (1, 0)]
