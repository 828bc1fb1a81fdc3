"""system=moecast as it is shipped, live: bitwise eager with good and bad forecasts, on one tier and
two, idle links at work and while settings are compared; with nothing learned it says so."""

import logging

import pytest
import torch

import runtime
from runtime.config import ModelConfig
from runtime.engine.forecasters import SystemPredictors
from runtime.policy.forecast_payoff import ForecastPayoff
from tests.builders.core_runs import RandomPredictor
from tests.builders.models import GREEDY, TOKENS
from tests.builders.served import serving


@pytest.mark.parametrize(("budget", "host"), [("15%", None), ("40%", "60%")])
def test_moecast__is_eager_whatever_is_forecast(folder, expected, monkeypatch, budget, host):
    def forecast_at_random(_, spec, *__, **___):
        reuse = RandomPredictor(1, spec=spec, num_rows=1)
        return SystemPredictors(forecast=RandomPredictor(0, spec=spec), reuse=reuse)

    monkeypatch.setattr("runtime.engine.loading.load_system_predictors", forecast_at_random)
    # With forecasts, without, with again.
    monkeypatch.setattr(ForecastPayoff, "record_step", lambda self, s: self._set(s * 1e6 % 2 < 1))
    with serving(folder, budget=budget, host_budget=host, system="moecast") as model:
        assert torch.equal(model.generate(TOKENS, **GREEDY), expected[1])
        stats = model.moecast.stats()
    assert stats["bytes_prefetched"] > 0
    assert stats["adaptive_prefetch"] is not None


def test_moecast__without_entries_uses_the_routers_and_warns(folder, expected, caplog) -> None:
    config = ModelConfig(name="nowhere", id=str(folder), dtype="float32")
    with caplog.at_level(logging.WARNING):
        model = runtime.load(config, system="moecast", budget="25%")
    with model.moecast as handle:
        assert torch.equal(model.generate(TOKENS, **GREEDY), expected[1])
        driver = handle.engine.driver
        assert (driver.predictor_kind, driver.reuse_predictor_kind) == ("skip", None)
    (message,) = caplog.messages
    assert message == (
        "no trained predictors for nowhere in float32: system moecast forecasts with skip (no "
        "residual) and evicts by usage counts (no reuse). To train them: moecast train "
        f"{folder} model.dtype=float32"
    )


def test_moecast__prompts_do_not_count_for_what_pays(folder, monkeypatch):
    recorded = []
    monkeypatch.setattr(ForecastPayoff, "record_step", lambda *_: recorded.append(1))
    with serving(folder, budget="25%", system="moecast") as model:
        for _ in range(2):
            model.generate(TOKENS, **GREEDY)
        # A batch of single tokens is a decode step.
        assert len(recorded) == model.moecast.stats()["num_decode_steps"] == 46
