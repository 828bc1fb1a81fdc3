"""A predictor on a separate thread: order, step boundaries, late answers, hangs and the end."""

import threading
from types import SimpleNamespace

import numpy as np
import pytest

from predictors.base import Forecast, Predictor, Signal
from runtime.engine import predictor_thread
from runtime.engine.driver import PredictorDriver
from runtime.engine.predictor_thread import PredictorEvent, PredictorThread
from runtime.transfer.worker import TransferState
from tests.builders.entries import tiny_spec

SPEC = tiny_spec(num_layers=3, num_experts=4, top_k=1)
ROUTED = np.zeros((1, 1), np.int64)


def event(name: str, *args) -> PredictorEvent:
    return PredictorEvent(name=name, args=args, step=1, num_tokens=1)


def test_thread__handles_copies_of_all_events_in_order() -> None:
    handled, release = [], threading.Event()

    def handle(item: PredictorEvent) -> None:
        release.wait()
        handled.append((item.name, *(arg.tolist() for arg in item.args)))

    thread = PredictorThread(handle, pytest.fail)
    array = np.zeros(2)
    for number in range(3):
        array[:] = number
        thread.add(event(str(number), array))
    release.set()
    thread.wait()
    assert handled == [(str(number), [number, number]) for number in range(3)]
    thread.close(timeout_seconds=240)
    thread.close(timeout_seconds=240)


def test_thread__events_that_wait_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(predictor_thread, "MAX_WAITING", 1)
    handled = []
    thread = PredictorThread(lambda item: handled.append(item.name), pytest.fail)
    for number in range(50):
        thread.add(event(str(number)))
        assert number - len(handled) <= 2
    thread.close(timeout_seconds=240)
    assert len(handled) == 50


def test_thread__gives_up_on_a_call_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(predictor_thread, "HANG_SECONDS", 0.01)
    release, reasons = threading.Event(), []
    thread = PredictorThread(lambda _: release.wait(), reasons.append)
    thread.add(event("hangs"))
    thread.wait()
    assert len(reasons) == 1
    thread.add(event("later"))
    thread.wait()
    thread.close(timeout_seconds=240)
    release.set()
    assert len(reasons) == 1


def test_thread__that_has_ended_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(predictor_thread, "CHECK_SECONDS", 0.01)
    reasons = []
    thread = PredictorThread(lambda _: None, reasons.append)
    thread.close(timeout_seconds=240)
    thread.add(event("late"))
    thread.wait()
    thread.wait()
    assert reasons == ["its thread has ended"]


@pytest.mark.parametrize("error", [RuntimeError("bad"), SystemExit("bad")])
def test_thread__failures_are_reported_and_end_nothing(error: BaseException) -> None:
    reasons = []

    def handle(item: PredictorEvent) -> None:
        if item.name == "fails":
            raise error

    thread = PredictorThread(handle, reasons.append)
    for name in ("fails", "works"):
        thread.add(event(name))
    thread.wait()
    thread.close(timeout_seconds=240)
    assert reasons == [f"{type(error).__name__}: bad"]


def test_thread__ctrl_c_between_an_event_and_its_count_holds_up_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    handled = []
    thread = PredictorThread(lambda item: handled.append(item.name), pytest.fail)

    def interrupt(_: PredictorEvent) -> PredictorEvent:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(PredictorEvent, "with_copies", interrupt)
        with pytest.raises(KeyboardInterrupt):
            thread.add(event("interrupted"))
    thread.add(event("next"))
    thread.wait()
    assert handled == ["next"]
    assert not thread.is_full
    thread.close(timeout_seconds=240)


class Gated(Predictor):
    """Forecasts the next layer from each gate input, when `release` is set."""

    kind = "gated"
    signals = frozenset({Signal.GATE_INPUT})

    def __init__(self, *, stateless: bool):
        super().__init__(SPEC)
        self.stateless = stateless  # type: ignore[misc]
        self.calls: list[object] = []
        self.release = threading.Event()
        self.release.set()

    def begin_step(self, tokens_T, requests_T):
        self.calls.append("begin")
        return ()

    def gate_input(self, layer, hidden_TD):
        self.release.wait()
        self.calls.append(layer)
        scores_TE = np.full((1, SPEC.num_experts), 0.5, np.float32)
        return [Forecast(layer + 1, scores_TE)] if layer + 1 < SPEC.num_layers else ()

    def end_step(self):
        self.calls.append("end")


class GatedDriver:
    """A driver with a predictor on a thread, and the layers whose forecasts were scheduled."""

    def __init__(self, *, stateless: bool, is_synchronous: bool = False):
        self.scheduled: list[int] = []
        scheduler = SimpleNamespace(
            prefetching=True,
            cache=SimpleNamespace(is_complete=False, tiers=()),
            schedule=lambda forecasts, **_: self.scheduled.extend(one.layer for one in forecasts),
        )
        self.predictor = Gated(stateless=stateless)
        self.driver = PredictorDriver(
            self.predictor, scheduler, TransferState(), is_synchronous=is_synchronous
        )

    def step(self, *, slow: bool = False) -> None:
        """One step; `slow`: no forecast is ready before the last layer is routed."""
        if slow:
            self.predictor.release.clear()
        self.driver.begin_step(np.zeros(1, np.int64), np.zeros(1, np.int64))
        for layer in range(SPEC.num_layers):
            self.driver.gate_input(layer, np.zeros((1, SPEC.hidden_size), np.float32))
            if not slow and self.driver._thread is not None:
                self.driver._thread.wait()
            self.driver.before_request(layer, ROUTED)
            self.driver.routed(layer, ROUTED, None)
        self.driver.end_step()
        self.predictor.release.set()

    def close(self) -> None:
        self.driver.close(timeout_seconds=240)


@pytest.mark.parametrize("stateless", [True, False])
def test_driver__late_forecasts_are_not_scheduled(stateless: bool) -> None:
    fast, slow = GatedDriver(stateless=stateless), GatedDriver(stateless=stateless)
    fast.step()
    slow.step(slow=True)
    fast.close()
    slow.close()
    assert fast.scheduled == [1, 2]
    assert slow.scheduled == []
    assert fast.predictor.calls == ["begin", 0, 1, 2, "end"]


def test_driver__a_stateless_predictor_skips_events_that_would_be_late() -> None:
    gated = GatedDriver(stateless=True)
    gated.step()
    gated.driver._thread.wait()
    gated.predictor.calls.clear()
    gated.step(slow=True)
    gated.close()
    # The first event may have begun; the last one's answer is for no layer, so never known as late.
    assert [call for call in gated.predictor.calls if call != 0] == ["begin", 2, "end"]


def test_driver__a_stateless_predictor_never_holds_up_the_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(predictor_thread, "MAX_WAITING", 1)
    gated = GatedDriver(stateless=True)
    gated.predictor.release.clear()
    gated.driver.begin_step(np.zeros(1, np.int64), np.zeros(1, np.int64))
    for layer in range(SPEC.num_layers):
        gated.driver.gate_input(layer, np.zeros((1, SPEC.hidden_size), np.float32))
    gated.predictor.release.set()
    gated.close()
    assert len(gated.predictor.calls) < 1 + SPEC.num_layers


def test_driver__a_step_begins_when_a_state_has_seen_the_last_one() -> None:
    gated = GatedDriver(stateless=False)
    gated.step(slow=True)
    gated.driver.begin_step(np.zeros(1, np.int64), np.zeros(1, np.int64))
    assert gated.predictor.calls[:5] == ["begin", 0, 1, 2, "end"]
    gated.close()


def test_driver__a_synchronous_predictor_has_no_thread() -> None:
    gated = GatedDriver(stateless=False, is_synchronous=True)
    assert gated.driver.is_synchronous
    gated.step()
    assert gated.scheduled == [1, 2]
    gated.close()
