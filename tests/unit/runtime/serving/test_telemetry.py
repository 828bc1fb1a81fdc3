"""The status reports what is known: before the model is loaded, afterwards, and after a failure."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from runtime.config import ModelConfig, SystemConfig
from runtime.presets import load_system
from runtime.serving.config import ServeConfig
from runtime.serving.service import ServiceObserver, ServiceState
from runtime.serving.status import Telemetry
from tests.builders.models import tiny_qwen2_moe
from tests.builders.served import serve

NAMES = {"system": "promoe", "eviction": "lru"}


class FakeService:
    """A service whose model is loaded when the test says so."""

    def __init__(self) -> None:
        self.state = ServiceState.LOADING
        self.loaded: Any = None
        self.observers: list[ServiceObserver] = []
        self._listeners: list[Callable[[ServiceState], None]] = []

    def add_observer(self, observer: ServiceObserver) -> None:
        self.observers.append(observer)

    def on_state_change(self, listener: Callable[[ServiceState], None]) -> None:
        self._listeners.append(listener)

    def change(self, state: ServiceState, model: Any = None) -> None:
        self.state = state
        if model is not None:
            info = SimpleNamespace(max_length=64, kv_budget=None)
            self.loaded = SimpleNamespace(model=model, info=info)
        for listener in self._listeners:
            listener(state)


@pytest.fixture
def service() -> FakeService:
    return FakeService()


@pytest.fixture
def telemetry(service: FakeService) -> Telemetry:
    system = SystemConfig(name=NAMES["system"], eviction=NAMES["eviction"])
    config = ServeConfig(model=ModelConfig(name="m"), max_running=2, max_waiting=3, system=system)
    return Telemetry(service, config, version="9")  # type: ignore[arg-type]


def test_status__of_a_model_that_is_loading(telemetry: Telemetry, service: FakeService) -> None:
    status = telemetry.status()
    assert (status["model"], status["state"], status["served"]) == ("m", "loading", None)
    assert status["queue"] == {"running": 0, "waiting": 0, "max_running": 2, "max_waiting": 3}
    assert status["memory"]["resident_bytes"] > 0
    assert "experts" not in status
    assert service.observers == [telemetry.metrics.requests, telemetry.recent]
    assert status["tokens"] == {"prompt": 0, "generated": 0, "generated_per_second": 0}
    assert status["latency"] == {"num_answers": 0, "ttft_seconds": None, "tpot_seconds": None}
    assert status["answers"] == []


@pytest.mark.parametrize("state", [ServiceState.FAILED, ServiceState.ENDED])
def test_status__of_a_model_that_could_not_be_loaded(
    telemetry: Telemetry, service: FakeService, state: ServiceState
) -> None:
    service.change(state)
    status = telemetry.status()
    assert (status["state"], status["served"]) == (str(state), None)


def test_status__includes_the_engine_once_it_is_ready(
    telemetry: Telemetry, service: FakeService, tmp_path: Path
) -> None:
    # On the computing thread: the forecasts of another one may come after the status.
    system = replace(load_system("moecast"), synchronous=True)
    budgets = {"budget": "50%", "host_budget": "100%"}
    model = serve(tiny_qwen2_moe(tmp_path), **budgets, predictor="skip", system=system)
    with model.moecast:
        service.change(ServiceState.READY, model)
        model(torch.tensor([[1, 2, 3]]))
        status = telemetry.status()
        _, kind = telemetry.metrics.render()
        assert kind.startswith("text/plain")
        service.change(ServiceState.DRAINING)
        assert telemetry.status()["state"] == "draining"
    assert status["served"] == {
        **NAMES,
        "predictor": "skip",
        "num_layers": 2,
        "num_experts": 8,
        "top_k": 2,
        "budget_bytes": model.moecast.budget_bytes,
    }
    assert [tier["name"] for tier in status["tiers"]] == ["device", "host"]
    assert [len(row) for row in status["cells"]] == [8, 8]
    assert status["experts"]["requests"] == sum(row["requests"] for row in status["layers"]) > 0
    assert status["experts"]["hit_rate"] == (
        status["experts"]["hits"] / status["experts"]["requests"]
    )
    # Every expert that was copied from host memory was read from the disk before.
    assert 0 < status["bytes_from"]["host"] == status["experts"]["bytes_moved"]
    assert status["bytes_from"]["disk"] > 0
    assert status["seconds"]["predictor"] > 0
    assert (status["faults"], status["lost_threads"]) == ({}, 0)
    assert status["predictor_drift"] is None  # no entry, no card
    assert status["prefetching"] in (True, False)  # the default system is adaptive
    assert telemetry.metrics.requests.max_length == 64
