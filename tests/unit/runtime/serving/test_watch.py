"""The status says what is known: before the model is there, while it is, and when it fails."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from runtime.serving.observer import Observer
from runtime.serving.service import State
from runtime.serving.watch import Watch
from tests.builders.models import tiny_qwen2_moe
from tests.builders.served import serve

NAMES = {"system": "promoe", "eviction": "lru"}


class FakeService:
    """Whose model appears when the test says so."""

    def __init__(self) -> None:
        self.state = State.LOADING
        self.served: Any = None
        self.observers: list[Observer] = []
        self._hears: list[Callable[[State], None]] = []

    def add_observer(self, observer: Observer) -> None:
        self.observers.append(observer)

    def on_change(self, hear: Callable[[State], None]) -> None:
        self._hears.append(hear)

    def change(self, state: State, model: Any = None) -> None:
        self.state = state
        if model is not None:
            self.served = SimpleNamespace(
                model=model, facts=SimpleNamespace(longest=64, caches=None)
            )
        for hear in self._hears:
            hear(state)


@pytest.fixture
def service() -> FakeService:
    return FakeService()


@pytest.fixture
def watch(service: FakeService) -> Watch:
    watch = Watch(model_name="m", max_running=2, max_waiting=3, version="9", **NAMES)
    watch.attach(service)  # type: ignore[arg-type]
    return watch


def test_status__before_the_model_is_there_says_so(watch: Watch, service: FakeService) -> None:
    said = watch.status()
    assert (said["model"], said["state"], said["served"]) == ("m", "loading", None)
    assert said["queue"] == {"running": 0, "waiting": 0, "max_running": 2, "max_waiting": 3}
    assert said["memory"]["resident_bytes"] > 0
    assert "experts" not in said
    assert service.observers == [watch.metrics.requests]


@pytest.mark.parametrize("state", [State.FAILED, State.ENDED])
def test_status__of_a_model_that_could_not_be_loaded(
    watch: Watch, service: FakeService, state: State
) -> None:
    service.change(state)
    said = watch.status()
    assert (said["state"], said["served"]) == (str(state), None)


def test_status__tells_the_engine_from_when_it_is_ready(
    watch: Watch, service: FakeService, tmp_path: Path
) -> None:
    model = serve(tiny_qwen2_moe(tmp_path), budget="50%", host_budget="100%", predictor="skip")
    with model.moecast:
        service.change(State.READY, model)
        model(torch.tensor([[1, 2, 3]]))
        said = watch.status()
        _, kind = watch.metrics.render()
        assert kind.startswith("text/plain")
        service.change(State.DRAINING)
        assert watch.status()["state"] == "draining"
    assert said["served"] == {
        **NAMES,
        "predictor": "skip",
        "num_layers": 2,
        "num_experts": 8,
        "top_k": 2,
        "budget_bytes": model.moecast.budget_bytes,
    }
    assert [tier["name"] for tier in said["tiers"]] == ["device", "host"]
    assert [len(row) for row in said["cells"]] == [8, 8]
    assert said["experts"]["requests"] == sum(layer["requests"] for layer in said["layers"]) > 0
    assert said["seconds"]["predictor"] > 0
    assert (said["faults"], said["lost_threads"], said["prefetching"]) == ({}, 0, None)
    assert watch.metrics.requests.context_tokens == 64
