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
from tests.builders.models import plain_eager
from tests.builders.served import settle

TOKENS = torch.randint(0, 64, (1, 12), generator=torch.Generator().manual_seed(1))
OPTIONS = {"do_sample": False, "pad_token_id": 0}


def serve(folder, **kwargs):
    model = ModelConfig(name="nowhere", id=str(folder), dtype="float32")
    return runtime.load(model, system="moecast", **kwargs)


@pytest.mark.parametrize(("budget", "host_budget"), [("15%", None), ("40%", "60%")])
def test_moecast__is_bitwise_eager_whatever_is_forecast(folder, monkeypatch, budget, host_budget):
    monkeypatch.setattr(
        "runtime.engine.loading.load_system_predictors",
        lambda _, spec, *__, **___: SystemPredictors(
            forecast=RandomPredictor(0, spec=spec), reuse=RandomPredictor(1, spec=spec, num_rows=1)
        ),
    )
    # With forecasts, without, with again.
    monkeypatch.setattr(
        ForecastPayoff, "record_step", lambda self, seconds: self._set(seconds * 1e6 % 2 < 1)
    )
    options = {"max_new_tokens": 24, **OPTIONS}
    expected = plain_eager(folder).generate(TOKENS, **options)
    model = serve(folder, budget=budget, host_budget=host_budget)
    with model.moecast as handle:
        assert torch.equal(model.generate(TOKENS, **options), expected)
        stats = handle.stats()
        cache = handle.engine.cache
        settle(handle.engine)
        for tier in cache.tiers:
            slots = [entry.slot for entry in tier.cache.entries.values()]
            assert len(set(slots)) == len(slots) <= tier.cache.num_slots
    assert stats["bytes_prefetched"] > 0
    assert stats["adaptive_prefetch"] is not None


def test_moecast__without_entries_uses_the_routers_and_warns(folder, caplog) -> None:
    expected = plain_eager(folder).generate(TOKENS, max_new_tokens=8, **OPTIONS)
    with caplog.at_level(logging.WARNING):
        model = serve(folder, budget="25%")
    with model.moecast as handle:
        assert torch.equal(model.generate(TOKENS, max_new_tokens=8, **OPTIONS), expected)
        assert handle.engine.driver.predictor_kind == "skip"
        assert handle.engine.driver.reuse_predictor_kind is None
    (message,) = [record.getMessage() for record in caplog.records]
    assert message == (
        "no trained predictors for nowhere in float32: system moecast forecasts with skip (no "
        "residual) and evicts by usage counts (no reuse). To train them: moecast train "
        f"{folder} model.dtype=float32"
    )


def test_moecast__prompts_do_not_count_for_what_pays(folder, monkeypatch):
    recorded = []
    monkeypatch.setattr(ForecastPayoff, "record_step", lambda *_: recorded.append(1))
    model = serve(folder, budget="25%")
    with model.moecast as handle:
        for _ in range(2):
            model.generate(TOKENS, max_new_tokens=8, **OPTIONS)
        assert len(recorded) == handle.stats()["num_decode_steps"] == 14
