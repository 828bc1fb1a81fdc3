"""What a predictor learns while serving is there after a restart."""

import errno
import os
from unittest.mock import Mock

import numpy as np
import pytest

from predictors.baselines import PopularityPredictor
from predictors.correlation import CorrelationPredictor
from predictors.eam.request import EamRequestPredictor
from predictors.eam.sequence import EamSequencePredictor
from predictors.errors import MoecastError
from predictors.metrics import CardAccuracy
from predictors.requests import IDLE_STEPS
from runtime.engine.driver import PredictorDriver
from runtime.engine.forecasters import LearnedStore
from runtime.policy.forecast_scheduler import ForecastScheduler
from tests.builders.predictors import serve, small_spec, token_step
from tests.unit.runtime.policy.test_device_cache import make_cache


def serve_requests(driver, spec, requests) -> None:
    for request in requests:
        driver.begin_step(np.array([0]), np.array([request]))
        for layer in range(spec.num_layers):
            driver.routed(layer, np.array([[request % spec.num_experts]]), None)
        driver.end_step()


def test_learned__is_there_after_a_restart(tmp_path) -> None:
    spec, folder = small_spec(), tmp_path / "learned"
    sizes = []
    for run in range(2):
        store = LearnedStore(folder, model="tiny")
        predictor = store.restore(EamRequestPredictor.empty(spec))
        driver = PredictorDriver(predictor, ForecastScheduler(make_cache(), top_k=1), learned=store)
        sizes.append(predictor.collection.size)
        serve_requests(driver, spec, range(100 * run, 100 * run + IDLE_STEPS + 3))
        driver.close()
    # The last requests of each run have not ended when the run does.
    assert sizes == [0, 3]
    assert LearnedStore(folder, model="tiny").restore(predictor).collection.size == 6


@pytest.mark.parametrize("kind", [CorrelationPredictor, PopularityPredictor])
def test_learned__goes_on_with_its_weight_after_a_restart(store, kind) -> None:
    served = kind.empty(small_spec(), learning=True)
    driver = PredictorDriver(served, ForecastScheduler(make_cache(), top_k=1), learned=store)
    serve_requests(driver, served.spec, range(6))
    driver.close()
    restored = store.restore(kind.empty(served.spec, learning=True))
    for predictor in (served, restored):
        serve(predictor, token_step(1, served.spec.num_layers, 1))
    own, other = (serve(one, token_step(1, 3, 2)) for one in (served, restored))
    for place, found in own.items():
        for layer, forecast in found.items():
            np.testing.assert_allclose(other[place][layer].scores_TE, forecast.scores_TE, rtol=1e-6)


@pytest.fixture
def store(tmp_path) -> LearnedStore:
    return LearnedStore(tmp_path / "learned", model="tiny")


@pytest.fixture
def predictor() -> EamRequestPredictor:
    return EamRequestPredictor.empty(small_spec())


def test_learned__is_saved_while_serving(tmp_path, store, predictor, monkeypatch) -> None:
    monkeypatch.setattr("runtime.engine.forecasters.SAVE_SECONDS", 0.0)
    store.step_ended(predictor)
    assert (tmp_path / "learned" / "manifest.json").is_file()


def test_learned__on_a_full_disk_is_a_warning(store, predictor, monkeypatch, caplog) -> None:
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    monkeypatch.setattr(os, "fsync", Mock(side_effect=full))
    monkeypatch.setattr("runtime.engine.forecasters.SAVE_SECONDS", 0.0)
    store.step_ended(predictor)
    assert "was not saved" in caplog.text
    assert "the disk is full" in caplog.text


def test_learned__has_the_card_of_the_entry_it_began_as_and_its_kind(store, predictor) -> None:
    predictor.card = CardAccuracy(entry="tiny/eam", decode=(0.5,), overall=(0.5,))
    store.step_ended(predictor)
    store.save(predictor)
    assert store.restore(predictor).card == predictor.card
    with pytest.raises(MoecastError, match="learned by eam-request, the model is served"):
        store.restore(EamSequencePredictor.empty(small_spec()))
