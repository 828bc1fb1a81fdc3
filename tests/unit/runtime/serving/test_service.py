"""The service's queue, cancellation, failures, shutdown and observers, with a fake model."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from runtime.errors import CheckpointError, TransferError
from runtime.generation.sampling import SamplingParams
from runtime.hf.kv import CacheSize
from runtime.serving.choice import (
    ChoiceEvent,
    ChoiceFailed,
    ChoiceFinished,
    CompletionChoice,
    FinishReason,
)
from runtime.serving.errors import (
    Draining,
    EngineDead,
    ExpertsUnreadable,
    GenerationFailed,
    QueueFull,
)
from runtime.serving.served_model import KVCacheBudget
from runtime.serving.service import GenerationService, LoadedModel, ServiceObserver, ServiceState
from tests.builders.plain_answers import TOKENIZER
from tests.builders.serving import WAIT_SECONDS, StepGate
from tests.builders.waiting import wait_for


class FakeSequence:
    def __init__(self, choice: CompletionChoice):
        self.choice = choice
        self.is_done = False
        self.error: Exception | None = None


@dataclass
class FakeGroup:
    """Generates one token per sequence and step; each step waits for the test's permission."""

    sequences: list[FakeSequence] = field(default_factory=list)
    allowed: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    failing: dict[str, Exception] = field(default_factory=dict)
    """Errors of the next step, by request id."""
    broken: Exception | None = None
    """Error of the next step of all sequences."""
    is_closed: bool = False

    def start(self, run: Callable[[], Any], *, seed: int | None = None) -> FakeSequence:
        choice = run.func.__self__  # type: ignore[attr-defined]
        run()
        sequence = FakeSequence(choice)
        self.sequences.append(sequence)
        return sequence

    def step(self) -> list[FakeSequence]:
        assert self.allowed.acquire(timeout=WAIT_SECONDS)
        if self.broken is not None:
            raise self.broken
        for sequence in self.sequences:
            sequence.error = self.failing.pop(sequence.choice.request_id, None)
            is_last = sequence.choice.on_token(20 + sequence.choice.num_tokens)
            limit = sequence.choice.sampling.max_new_tokens
            sequence.is_done = (
                is_last or sequence.choice.num_tokens == limit or sequence.error is not None
            )
        ended = [sequence for sequence in self.sequences if sequence.is_done]
        self.sequences = [sequence for sequence in self.sequences if not sequence.is_done]
        return ended

    def cancel(self, sequence: FakeSequence) -> None:
        self.sequences.remove(sequence)
        sequence.is_done = True

    def close(self) -> None:
        self.is_closed = True


class EventLog:
    def __init__(self) -> None:
        self.events: list[ChoiceEvent] = []
        self.changed = threading.Condition()

    def __call__(self, events: list[ChoiceEvent]) -> None:
        with self.changed:
            self.events += events
            self.changed.notify_all()

    def wait(self, number: int) -> list[ChoiceEvent]:
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.events) >= number, WAIT_SECONDS)
            return list(self.events)

    def last(self) -> ChoiceEvent:
        with self.changed:
            assert self.changed.wait_for(
                lambda: self.events and isinstance(self.events[-1], ChoiceFinished | ChoiceFailed),
                WAIT_SECONDS,
            )
            return self.events[-1]


def make_choice(request_id: str = "r", num_tokens: int = 3) -> tuple[CompletionChoice, EventLog]:
    log = EventLog()
    sampling = SamplingParams(max_new_tokens=num_tokens, temperature=0)
    return CompletionChoice([1, 2], sampling, deliver=log, request_id=request_id), log


def fake_model() -> Any:
    text_config = SimpleNamespace(vocab_size=8192)
    config = SimpleNamespace(get_text_config=lambda: text_config, is_encoder_decoder=False)
    return SimpleNamespace(
        device="cpu", config=config, close=lambda: None, generate=lambda inputs, **_: inputs
    )


@contextmanager
def serving(
    *,
    max_running: int = 2,
    max_waiting: int = 1,
    group: FakeGroup | None = None,
    kv_budget: KVCacheBudget | None = None,
    **options: Any,
) -> Iterator[tuple[GenerationService, FakeGroup]]:
    group = group or FakeGroup()
    info: Any = SimpleNamespace(tokenizer=TOKENIZER, kv_budget=kv_budget)
    loaded = LoadedModel(model=fake_model(), group=group, info=info)
    service = GenerationService(
        lambda: loaded, max_running=max_running, max_waiting=max_waiting, **options
    )
    ready = threading.Event()
    service.on_state_change(lambda _: ready.set())
    service.start()
    assert ready.wait(WAIT_SECONDS)
    try:
        yield service, group
    finally:
        group.allowed.release(1000)
        assert service.close(timeout_seconds=WAIT_SECONDS)
        assert group.is_closed


def wait_for_running(service: GenerationService, number: int) -> None:
    """Wait until this number of choices is running."""
    wait_for(lambda: service.num_running == number)


def test_choices__start_when_running_ones_end() -> None:
    with serving() as (service, group):
        first, second, third = make_choice("1", 1), make_choice("2", 3), make_choice("3", 1)
        service.submit([first[0]])
        wait_for_running(service, 1)
        service.submit([second[0], third[0]])
        group.allowed.release()
        assert first[1].last() == ChoiceFinished(FinishReason.LENGTH)
        wait_for_running(service, 2)
        assert service.num_waiting == 0
        group.allowed.release(3)
        assert second[1].last() == third[1].last() == ChoiceFinished(FinishReason.LENGTH)
        assert second[0].num_tokens == 3
        assert service.wait_idle(WAIT_SECONDS)


def test_choices__wait_until_their_kv_caches_fit() -> None:
    """Each choice reserves its maximum length; the order of arrival is kept."""
    kv_budget = KVCacheBudget(CacheSize(1, 0), 12)  # each prompt has two tokens
    with serving(max_running=4, max_waiting=4, kv_budget=kv_budget) as (service, group):
        first, large, small = make_choice("1", 4), make_choice("2", 10), make_choice("3", 1)
        service.submit([first[0], large[0], small[0]])
        wait_for_running(service, 1)
        group.allowed.release(3)
        first[1].wait(3)
        assert (service.num_running, service.num_waiting) == (1, 2)
        group.allowed.release()
        assert first[1].last() == ChoiceFinished(FinishReason.LENGTH)
        wait_for(lambda: large[0].started_at is not None)
        wait_for_running(service, 1)
        assert small[0].started_at is None
        group.allowed.release(11)
        assert large[1].last() == small[1].last() == ChoiceFinished(FinishReason.LENGTH)
        fitting = [make_choice(str(number), 4) for number in (4, 5)]
        service.submit([choice for choice, _ in fitting])
        wait_for_running(service, 2)


def test_submit__queues_all_choices_of_a_request_or_none() -> None:
    with serving(max_running=2, max_waiting=1) as (service, _):
        service.submit([make_choice()[0]])
        with pytest.raises(QueueFull) as rejection:
            service.submit([make_choice()[0] for _ in range(3)])
        assert rejection.value.status == 429
        assert rejection.value.retry_after_seconds
        service.submit([make_choice()[0] for _ in range(2)])
        with pytest.raises(QueueFull):
            service.require_capacity()
        # A choice that starts is in neither for a moment.
        wait_for(lambda: service.num_running + service.num_waiting == 3)


def test_cancel__ends_a_choice_before_the_next_step() -> None:
    with serving() as (service, group):
        stays, goes = make_choice("stays", 5), make_choice("goes", 1000)
        service.submit([stays[0], goes[0]])
        group.allowed.release()
        goes[1].wait(1)
        service.cancel([goes[0]])
        group.allowed.release(2)
        assert goes[1].last() == ChoiceFinished(FinishReason.ABORT)
        # The step that runs during the cancellation may still add one token.
        assert goes[0].num_tokens <= 2
        assert goes[0].finish_reason is FinishReason.ABORT
        group.allowed.release(3)
        assert stays[1].last() == ChoiceFinished(FinishReason.LENGTH)
        assert stays[0].num_tokens == 5
        service.cancel([stays[0], goes[0]])
        assert service.wait_idle(WAIT_SECONDS)
        for _, log in (stays, goes):
            assert sum(isinstance(event, ChoiceFinished) for event in log.events) == 1


def test_cancel__frees_the_place_of_a_waiting_choice_at_once() -> None:
    with serving(max_running=1, max_waiting=1) as (service, _):
        runs, waits = make_choice("runs", 1000), make_choice("waits")
        service.submit([runs[0]])
        wait_for_running(service, 1)
        service.submit([waits[0]])
        service.cancel([waits[0]])
        assert waits[1].events == [ChoiceFinished(FinishReason.ABORT)]
        assert service.num_waiting == 0
        service.require_capacity()


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (TransferError("layer 3: short read"), ExpertsUnreadable),
        (RuntimeError("out of memory"), GenerationFailed),
    ],
)
def test_generation_failure__ends_one_choice_only(
    error: Exception, expected: type[Exception]
) -> None:
    group = FakeGroup(failing={"fails": error})
    with serving(group=group) as (service, _):
        fails, goes_on = make_choice("fails", 3), make_choice("goes on", 3)
        service.submit([fails[0], goes_on[0]])
        group.allowed.release(3)
        last = fails[1].last()
        assert isinstance(last, ChoiceFailed)
        assert type(last.error) is expected
        assert last.error.status == 500
        # Clients get the request id of an internal error, not its message.
        assert ("out of memory" in str(last.error)) is False
        assert goes_on[1].last() == ChoiceFinished(FinishReason.LENGTH)
        assert service.state is ServiceState.READY


def test_engine_failure__fails_running_waiting_and_new_choices() -> None:
    group = FakeGroup(broken=RuntimeError("broken"))
    states: list[ServiceState] = []
    with serving(group=group) as (service, _):
        service.on_state_change(states.append)
        choices = [make_choice(str(number), 3) for number in range(3)]
        service.submit([choice for choice, _ in choices])
        group.allowed.release()
        for _, log in choices:
            last = log.last()
            assert isinstance(last, ChoiceFailed)
            assert isinstance(last.error, EngineDead)
        assert states == [ServiceState.FAILED]
        assert not service.is_alive
        with pytest.raises(EngineDead):
            service.submit([make_choice()[0]])
        assert service.wait_idle(WAIT_SECONDS)
        assert str(service.error) == "broken"


def test_failed_load__rejects_requests_with_its_error() -> None:
    def missing() -> LoadedModel:
        raise CheckpointError("no such model")

    service = GenerationService(missing, max_running=1, max_waiting=1)
    failed = threading.Event()
    service.on_state_change(lambda _: failed.set())
    service.start()
    assert failed.wait(WAIT_SECONDS)
    assert isinstance(service.error, CheckpointError)
    with pytest.raises(EngineDead, match="no such model"):
        service.require_capacity()
    assert service.close(timeout_seconds=WAIT_SECONDS)


def test_close__in_a_long_step_fails_all_choices_at_once() -> None:
    with serving(max_running=1, max_waiting=1) as (service, group):
        runs, waits = make_choice("runs", 1000), make_choice("waits", 1000)
        service.submit([runs[0]])
        wait_for_running(service, 1)
        service.submit([waits[0]])
        assert not service.close(timeout_seconds=0.05)
        for _, log in (runs, waits):
            last = log.last()
            assert isinstance(last, ChoiceFailed)
            assert isinstance(last.error, Draining)
        assert service.wait_idle(0)
        assert not group.is_closed


def test_observers__get_each_event_once() -> None:
    gate = StepGate()
    with serving(max_running=1, max_waiting=1, observers=[gate]) as (service, group):
        first, second = make_choice("1", 1), make_choice("2", 1)
        service.submit([first[0]])
        wait_for_running(service, 1)
        service.submit([second[0]])
        with pytest.raises(QueueFull):
            service.submit([make_choice()[0]])
        service.cancel([second[0]])
        group.allowed.release()
        first[1].last()
        assert service.wait_idle(WAIT_SECONDS)
    events = [
        (event, getattr(what, "request_id", type(what).__name__)) for event, what in gate.events
    ]
    expected = [(event, "1") for event in ("queued", "started", "ended")]
    expected += [("queued", "2"), ("ended", "2"), ("rejected", "QueueFull")]
    assert sorted(events) == sorted(expected)
    assert (first[0].finish_reason, second[0].finish_reason) == ("length", "abort")
    assert None not in (first[0].started_at, first[0].ended_at, second[0].ended_at)


def test_on_idle__is_called_once_per_idle_period() -> None:
    events: list[str] = []
    became_idle = threading.Semaphore(0)

    class EventRecorder(ServiceObserver):
        def on_ended(self, choice: CompletionChoice) -> None:
            events.append(choice.request_id)

        def on_idle(self) -> None:
            events.append("idle")
            became_idle.release()

    with serving(observers=[EventRecorder()], idle_after_seconds=0.05) as (service, group):
        assert became_idle.acquire(timeout=WAIT_SECONDS)  # before the first request
        group.allowed.release(2)
        for name in ("1", "2"):
            choice, log = make_choice(name, 1)
            service.submit([choice])
            log.last()
            assert became_idle.acquire(timeout=WAIT_SECONDS)
        assert not became_idle.acquire(timeout=0.3)
    assert events == ["idle", "1", "idle", "2", "idle"]
