"""A predictor that is less accurate than its card says is reported, one that fits is not."""

import json
import logging
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from predictors.base import Forecast, Predictor, Signal
from predictors.metrics import CardAccuracy
from runtime.config import SystemConfig
from runtime.engine import predictor_drift
from runtime.engine.driver import PredictorDriver
from runtime.engine.monitor import EngineMonitor
from runtime.engine.predictor_drift import SAMPLE_STEPS, WINDOW_TOKENS, DriftMonitor, SampledStep
from runtime.policy.forecast_scheduler import ForecastScheduler
from runtime.serving.observe.metrics import ServerMetrics
from tests.builders.entries import write_popularity
from tests.builders.predictors import small_spec
from tests.builders.served import serve, serving
from tests.unit.runtime.policy.test_device_cache import make_cache
from tests.unit.runtime.serving.test_metrics import INFO

TRAIN = "moecast train tiny"
SCORE = "moecast zoo score tiny/mlp"
NUM_EXPERTS = 4
SPEC = small_spec(num_experts=NUM_EXPERTS)


def monitor_of(*accuracies: float | None, kind: type = DriftMonitor) -> Any:
    card = CardAccuracy(entry="tiny/mlp", decode=accuracies, overall=accuracies)
    return kind(card, top_k=1, score_command=SCORE, train_command=TRAIN)


def one_hot(experts: list[int]) -> np.ndarray:
    return np.eye(NUM_EXPERTS, dtype=np.float32)[experts]


def window(hits: int, *, layers: int = 1, size: int = WINDOW_TOKENS) -> SampledStep:
    """A whole window in one step, in which this many tokens of every layer are forecast well."""
    step = SampledStep()
    for layer in range(layers):
        forecast, before = Forecast(layer, one_hot([1] * size)), layer - 1
        step.add_forecasts([forecast], signal="gate_input", layer=before, layer_now=before)
        step.add_routing(layer, np.repeat([1, 2], [hits, size - hits])[:, None])
    return step


def serve_windows(monitor: DriftMonitor, hits: list[int], caplog) -> list[str]:
    """Levels of the lines that the windows lead to."""
    caplog.clear()
    with caplog.at_level(logging.INFO, logger=predictor_drift.__name__):
        for one in hits:
            monitor.add(window(one))
    return [record.levelname for record in caplog.records]


@given(st.lists(st.integers(0, 500), max_size=12))
def test_monitor__warns_at_one_drop_and_clears_at_a_smaller_one(hits):
    """In integers: .9 is 450 of 500, .05 is 25, .025 is 12.5."""
    monitor, drifted = monitor_of(0.9), False
    for one in hits:
        monitor.add(window(one))
        lost = 450 - one
        if lost != 25:  # the limit itself is a matter of rounding
            drifted = lost > 12.5 if drifted else lost > 25
            assert monitor.report.has_drifted is drifted
        drifted = monitor.report.has_drifted
        assert monitor.report.accuracy == (one / 500,)


def test_monitor__says_each_change_once(caplog):
    monitor = monitor_of(0.9)
    bad, edge, good = 400, 432, 440
    assert predictor_drift.CLEARED_DROP < (0.9 - edge / WINDOW_TOKENS) < predictor_drift.MAX_DROP
    assert serve_windows(monitor, [edge, good], caplog) == []
    assert serve_windows(monitor, [bad, bad, edge, bad], caplog) == ["WARNING"]
    message = caplog.records[0].getMessage()
    assert "tiny/mlp no longer fits what is served: its accuracy over the last 500" in message
    assert "is 0.800, its card has 0.900." in message
    ways = f"To see all metrics on prompts like these: {SCORE}. To train an entry on them: {TRAIN}"
    assert message.endswith(ways)
    assert serve_windows(monitor, [good, good, edge], caplog) == []
    assert serve_windows(monitor, [bad], caplog) == ["WARNING"]


def test_monitor__judges_after_a_window_only():
    monitor, step = monitor_of(0.9), window(0, size=10)
    for _ in range(WINDOW_TOKENS // 10 - 1):
        monitor.add(step)
    assert (monitor.report.num_tokens, monitor.report.mean_drop) == (0, None)
    monitor.add(step)
    assert (monitor.report.num_tokens, monitor.report.has_drifted) == (WINDOW_TOKENS, True)


def test_monitor__leaves_out_layers_that_the_card_does_not_have():
    monitor = monitor_of(None, 0.5)
    monitor.add(window(250, layers=2))
    assert monitor.report.accuracy == (None, 0.5)
    assert monitor.report.mean_drop == pytest.approx(0.0)


def test_sample__keeps_a_layers_last_forecast_before_its_router():
    step, own = SampledStep(), one_hot([3])
    for layer, layer_now, scores in [(-1, -1, one_hot([0])), (0, 0, own), (1, 2, one_hot([0]))]:
        forecasts = [Forecast(1, scores)]
        step.add_forecasts(forecasts, signal="gate_input", layer=layer, layer_now=layer_now)
    own[:] = 0.0  # the predictor's own memory
    step.add_routing(0, np.array([[2]]))
    step.add_routing(1, np.array([[3]]))
    ((distance, forecast, experts_TK),) = step.pairs()
    assert (distance, forecast.layer) == ("1", 1)
    assert forecast.chosen_TK(1).tolist() == experts_TK.tolist() == [[3]]


def test_sample__without_the_routing_of_all_tokens_has_no_pair():
    step = SampledStep()
    step.add_forecasts([Forecast(0, one_hot([1, 2]))], signal="x", layer=-1, layer_now=-1)
    step.add_routing(0, np.array([[1]]))
    assert list(step.pairs()) == []


class Rotating(Predictor):
    """Forecasts expert `t % 4` of every layer in step t; counts the steps."""

    kind = "rotating"
    signals = frozenset({Signal.TOKENS})

    def __init__(self, spec, *, stateless: bool):
        super().__init__(spec)
        self.stateless = stateless  # type: ignore[misc]
        self.num_steps = 0

    def begin_step(self, tokens_T, requests_T):
        self.num_steps += 1
        scores_TE = one_hot([self.num_steps % NUM_EXPERTS] * len(tokens_T))
        return [Forecast(layer, scores_TE) for layer in range(self.spec.num_layers)]


class RecordedSamples(DriftMonitor):
    """Keeps what it is given."""

    def add(self, step: SampledStep) -> None:
        chosen = [(it.layer, it.chosen_TK(1), experts_TK) for _, it, experts_TK in step.pairs()]
        pairs = [(layer, int(ours[0, 0]), int(own[0, 0])) for layer, ours, own in chosen]
        self.samples = [*getattr(self, "samples", []), pairs]


def driver_of(predictor: Predictor) -> tuple[PredictorDriver, RecordedSamples]:
    monitor = monitor_of(0.9, 0.9, 0.9, kind=RecordedSamples)
    scheduler = ForecastScheduler(make_cache(), top_k=1)
    return PredictorDriver(predictor, scheduler, drift=monitor), monitor


def drive(driver: PredictorDriver, number: int = 0, *, is_decode: bool = True) -> None:
    """A step in which layer n chooses expert `number + n`."""
    driver.begin_step(np.zeros(1, np.int64), np.zeros(1, np.int64), is_decode=is_decode)
    for layer in range(SPEC.num_layers):
        routing = np.array([[(number + layer) % NUM_EXPERTS]])
        driver.before_request(layer, routing, None, ())
        driver.routed(layer, routing, None)
        routing[:] = 0  # the engine's own memory
    driver.end_step()


@pytest.mark.parametrize("stateless", [True, False])
def test_driver__compares_one_decode_step_in_eight(stateless):
    driver, monitor = driver_of(Rotating(SPEC, stateless=stateless))
    expected = []
    kinds = [True] * 5 + [False] * 3 + [True] * (2 * SAMPLE_STEPS)
    for number, is_decode in enumerate(kinds, start=1):
        drive(driver, number, is_decode=is_decode)
        if number in (5 + 3 + 3, 5 + 3 + 3 + SAMPLE_STEPS):  # the 8th and the 16th decode step
            forecast, layers = number % NUM_EXPERTS, range(SPEC.num_layers)
            expected.append([(n, forecast, (number + n) % NUM_EXPERTS) for n in layers])
    driver.close()
    assert monitor.samples == expected


def test_driver__begins_again_where_the_predictor_missed_steps():
    """With prefetching off a predictor does not see the tokens: its next forecasts are worse."""
    driver, monitor = driver_of(Rotating(SPEC, stateless=False))
    for _ in range(SAMPLE_STEPS - 1):
        drive(driver)
    with driver.paused():
        drive(driver)
    for _ in range(SAMPLE_STEPS - 1):
        drive(driver)
    assert not hasattr(monitor, "samples")
    drive(driver)
    assert len(monitor.samples) == 1


# ---- live


OPTIONS: dict[str, Any] = {"max_new_tokens": 28, "do_sample": False, "pad_token_id": 0}


def serve_drift(folder, entry) -> tuple[dict[str, Any], ServerMetrics]:
    """Generates; returns the statistics and the metrics, read before the model is closed."""
    system = SystemConfig(synchronous=True)
    with serving(folder, budget="50%", predictor=entry, system=system) as model:
        model.generate(torch.arange(1, 8)[None], **OPTIONS)
        metrics = ServerMetrics(model_name="m", max_running=1)
        metrics.add_engine(EngineMonitor(model.moecast.engine), info=INFO)
        metrics.render()
        return json.loads(json.dumps(model.moecast.stats()["predictor_drift"])), metrics


def test_serving__compares_the_entry_with_its_card(folder, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(predictor_drift, "WINDOW_TOKENS", 3)  # of 27 decode steps, 3 are sampled
    with serve(folder, budget="50%", predictor="skip").moecast as handle:
        spec = handle.spec
        assert handle.stats()["predictor_drift"] is None  # no entry, no card

    def value(metrics: ServerMetrics, name: str, **labels: str) -> float | None:
        labels = {"model_name": "m", **labels}
        return metrics.registry.get_sample_value(f"moecast_predictor_{name}", labels)

    entry = write_popularity(tmp_path / "claims", spec, [1.0, 1.0, None])
    drift, metrics = serve_drift(folder, entry)
    found = [drift[name] for name in ("entry", "num_tokens", "has_drifted", "card_accuracy")]
    assert found == ["tiny/popularity", 3, True, [1.0, 1.0, None]]
    assert drift["accuracy"][2] is None
    assert value(metrics, "drifted") == 1
    assert value(metrics, "accuracy", layer="0") == drift["accuracy"][0] < 0.95
    assert value(metrics, "card_accuracy", layer="0") == 1
    assert value(metrics, "accuracy", layer="2") is None
    (warning,) = [one for one in caplog.records if "no longer fits" in one.getMessage()]
    assert f"moecast train {folder} " in warning.getMessage()

    caplog.clear()
    entry = write_popularity(tmp_path / "fits", spec, drift["accuracy"])
    drift, metrics = serve_drift(folder, entry)
    assert (drift["mean_drop"], value(metrics, "drifted")) == (pytest.approx(0.0), 0)
    assert not [one for one in caplog.records if "no longer fits" in one.getMessage()]
