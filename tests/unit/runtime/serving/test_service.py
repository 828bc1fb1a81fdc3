"""The queue is bounded, answers are cancelled within a step, and one failure is one request's."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import AutoTokenizer

from runtime.config import BUILTIN_MODELS
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
    NotReady,
    QueueFull,
)
from runtime.serving.model_info import KVCacheBudget
from runtime.serving.service import GenerationService, LoadedModel, ServiceObserver, ServiceState

TOKENIZER = AutoTokenizer.from_pretrained(BUILTIN_MODELS / "qwen2_moe_tiny")
WAIT = 10.0


class FakeMember:
    def __init__(self, choice: CompletionChoice):
        self.choice = choice
        self.is_done = False
        self.error: Exception | None = None


@dataclass
class FakeGroup:
    """One token for each member a step, when the test allows a step."""

    members: list[FakeMember] = field(default_factory=list)
    allowed: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    failing: dict[str, Exception] = field(default_factory=dict)
    """By request id, what ends that member's next step."""
    broken: Exception | None = None
    """What ends the next step of all."""
    is_closed: bool = False

    def start(self, run: Callable[[], Any], *, seed: int | None = None) -> FakeMember:
        choice = run.func.__self__  # type: ignore[attr-defined]
        run()
        member = FakeMember(choice)
        self.members.append(member)
        return member

    def step(self) -> list[FakeMember]:
        assert self.allowed.acquire(timeout=WAIT)
        if self.broken is not None:
            raise self.broken
        for member in self.members:
            member.error = self.failing.pop(member.choice.request_id, None)
            is_last = member.choice.on_token(20 + member.choice.num_tokens)
            limit = member.choice.sampling.max_new_tokens
            member.is_done = (
                is_last or member.choice.num_tokens == limit or member.error is not None
            )
        ended = [member for member in self.members if member.is_done]
        self.members = [member for member in self.members if not member.is_done]
        return ended

    def cancel(self, member: FakeMember) -> None:
        self.members.remove(member)
        member.is_done = True

    def close(self) -> None:
        self.is_closed = True


class Inbox:
    def __init__(self) -> None:
        self.events: list[ChoiceEvent] = []
        self.changed = threading.Condition()

    def __call__(self, events: list[ChoiceEvent]) -> None:
        with self.changed:
            self.events += events
            self.changed.notify_all()

    def wait(self, number: int) -> list[ChoiceEvent]:
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.events) >= number, WAIT)
            return list(self.events)

    def last(self) -> ChoiceEvent:
        with self.changed:
            assert self.changed.wait_for(
                lambda: self.events and isinstance(self.events[-1], ChoiceFinished | ChoiceFailed),
                WAIT,
            )
            return self.events[-1]


def asked(request_id: str = "r", num_tokens: int = 3) -> tuple[CompletionChoice, Inbox]:
    inbox = Inbox()
    sampling = SamplingParams(max_new_tokens=num_tokens, temperature=0)
    return CompletionChoice([1, 2], sampling, deliver=inbox, request_id=request_id), inbox


def fake_model() -> Any:
    config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(vocab_size=8192))
    return SimpleNamespace(
        device="cpu", config=config, close=lambda: None, generate=lambda *_, **__: None
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
    facts: Any = SimpleNamespace(tokenizer=TOKENIZER, kv_budget=kv_budget)
    served = LoadedModel(model=fake_model(), group=group, info=facts)
    service = GenerationService(
        lambda: served, max_running=max_running, max_waiting=max_waiting, **options
    )
    ready = threading.Event()
    service.on_state_change(lambda _: ready.set())
    service.start()
    assert ready.wait(WAIT)
    try:
        yield service, group
    finally:
        group.allowed.release(1000)
        assert service.close(timeout_seconds=WAIT)
        assert group.is_closed


def started(service: GenerationService, number: int) -> None:
    """Waits until so many are generated."""
    for _ in range(1000):
        if service.num_running == number:
            return
        threading.Event().wait(0.01)
    raise AssertionError(f"{service.num_running} run, not {number}")


def test_answers__run_together_and_the_next_ones_when_there_is_room() -> None:
    with serving() as (service, group):
        first, second, third = asked("1", 1), asked("2", 3), asked("3", 1)
        service.submit([first[0]])
        started(service, 1)
        service.submit([second[0], third[0]])
        group.allowed.release()
        assert first[1].last() == ChoiceFinished(FinishReason.LENGTH)
        started(service, 2)
        assert service.num_waiting == 0
        group.allowed.release(3)
        assert second[1].last() == third[1].last() == ChoiceFinished(FinishReason.LENGTH)
        assert second[0].num_tokens == 3
        assert service.wait_idle(WAIT)


def test_answers__whose_caches_do_not_fit_together_wait() -> None:
    """Room is kept for all that an answer may become, in the order in which they came."""
    caches = KVCacheBudget(CacheSize(1, 0), 12)  # each prompt has two tokens
    with serving(max_running=4, max_waiting=4, kv_budget=caches) as (service, group):
        first, large, small = asked("1", 4), asked("2", 10), asked("3", 1)
        service.submit([first[0], large[0], small[0]])
        started(service, 1)
        group.allowed.release(3)
        first[1].wait(3)
        assert (service.num_running, service.num_waiting) == (1, 2)
        group.allowed.release()
        assert first[1].last() == ChoiceFinished(FinishReason.LENGTH)
        started(service, 1)
        assert (large[0].started_at is None, small[0].started_at) == (False, None)
        group.allowed.release(11)
        assert large[1].last() == small[1].last() == ChoiceFinished(FinishReason.LENGTH)
        fitting = [asked(str(number), 4) for number in (4, 5)]
        service.submit([choice for choice, _ in fitting])
        started(service, 2)


def test_queue__takes_a_request_whole_or_not_at_all() -> None:
    with serving(max_running=2, max_waiting=1) as (service, _):
        service.submit([asked()[0]])
        with pytest.raises(QueueFull) as refused:
            service.submit([asked()[0] for _ in range(3)])
        assert refused.value.status == 429
        assert refused.value.retry_after_seconds
        service.submit([asked()[0] for _ in range(2)])
        with pytest.raises(QueueFull):
            service.require_capacity()
        assert service.num_running + service.num_waiting == 3


def test_cancelled__ends_before_the_next_step_and_others_go_on() -> None:
    with serving() as (service, group):
        stays, goes = asked("stays", 5), asked("goes", 1000)
        service.submit([stays[0], goes[0]])
        group.allowed.release()
        goes[1].wait(1)
        service.cancel([goes[0]])
        group.allowed.release(2)
        assert goes[1].last() == ChoiceFinished(FinishReason.ABORT)
        # The step under way when it was cancelled may still have told one token.
        assert goes[0].num_tokens <= 2
        assert goes[0].finish_reason is FinishReason.ABORT
        group.allowed.release(3)
        assert stays[1].last() == ChoiceFinished(FinishReason.LENGTH)
        assert stays[0].num_tokens == 5


def test_cancelled_in_the_queue__gives_its_place_back_at_once() -> None:
    with serving(max_running=1, max_waiting=1) as (service, _):
        runs, waits = asked("runs", 1000), asked("waits")
        service.submit([runs[0]])
        started(service, 1)
        service.submit([waits[0]])
        service.cancel([waits[0]])
        assert waits[1].events == [ChoiceFinished(FinishReason.ABORT)]
        assert service.num_waiting == 0
        service.require_capacity()


def test_cancelled_twice_or_late__stays_as_it_is() -> None:
    with serving() as (service, group):
        choice, inbox = asked(num_tokens=1)
        service.submit([choice])
        group.allowed.release()
        inbox.last()
        service.cancel([choice])
        service.cancel([choice])
        assert service.wait_idle(WAIT)
        assert [one for one in inbox.events if isinstance(one, ChoiceFinished)] == [
            ChoiceFinished(FinishReason.LENGTH)
        ]


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (TransferError("layer 3: short read"), ExpertsUnreadable),
        (RuntimeError("out of memory"), GenerationFailed),
    ],
)
def test_failure_of_one__is_its_own(error: Exception, expected: type[Exception]) -> None:
    group = FakeGroup(failing={"fails": error})
    with serving(group=group) as (service, _):
        fails, goes_on = asked("fails", 3), asked("goes on", 3)
        service.submit([fails[0], goes_on[0]])
        group.allowed.release(3)
        last = fails[1].last()
        assert isinstance(last, ChoiceFailed)
        assert type(last.error) is expected
        assert last.error.status == 500
        # What a client is told of a fault of ours is its request id, not what Python said.
        assert ("out of memory" in str(last.error)) is False
        assert goes_on[1].last() == ChoiceFinished(FinishReason.LENGTH)
        assert service.state is ServiceState.READY


def test_engines_failure__is_told_to_all_and_to_those_who_come() -> None:
    group = FakeGroup(broken=RuntimeError("broken"))
    states: list[ServiceState] = []
    with serving(group=group) as (service, _):
        service.on_state_change(states.append)
        asked_for = [asked(str(number), 3) for number in range(3)]
        service.submit([choice for choice, _ in asked_for])
        group.allowed.release()
        for _, inbox in asked_for:
            last = inbox.last()
            assert isinstance(last, ChoiceFailed)
            assert isinstance(last.error, EngineDead)
        assert states == [ServiceState.FAILED]
        assert not service.is_alive
        with pytest.raises(EngineDead):
            service.submit([asked()[0]])
        assert service.wait_idle(WAIT)
        assert str(service.error) == "broken"


def test_load_that_fails__is_kept_and_refuses() -> None:
    def missing() -> LoadedModel:
        raise CheckpointError("no such model")

    service = GenerationService(missing, max_running=1, max_waiting=1)
    failed = threading.Event()
    service.on_state_change(lambda _: failed.set())
    service.start()
    assert failed.wait(WAIT)
    assert isinstance(service.error, CheckpointError)
    with pytest.raises(EngineDead, match="no such model"):
        service.require_capacity()
    assert service.close(timeout_seconds=WAIT)


def test_loading__takes_nothing_yet() -> None:
    go_on = threading.Event()

    def slow() -> LoadedModel:
        assert go_on.wait(WAIT)
        facts: Any = SimpleNamespace(tokenizer=TOKENIZER, kv_budget=None)
        return LoadedModel(model=fake_model(), group=FakeGroup(), info=facts)

    service = GenerationService(slow, max_running=1, max_waiting=1)
    service.start()
    with pytest.raises(NotReady):
        service.submit([asked()[0]])
    assert service.is_alive
    service.drain()
    go_on.set()
    assert service.close(timeout_seconds=WAIT)
    assert service.state is ServiceState.ENDED


def test_draining__completes_what_runs_and_what_waits() -> None:
    with serving(max_running=1, max_waiting=1) as (service, group):
        runs, waits = asked("runs", 2), asked("waits", 2)
        service.submit([runs[0]])
        started(service, 1)
        service.submit([waits[0]])
        service.drain()
        with pytest.raises(Draining):
            service.submit([asked()[0]])
        assert not service.wait_idle(0)
        group.allowed.release(4)
        assert runs[1].last() == waits[1].last() == ChoiceFinished(FinishReason.LENGTH)
        assert service.wait_idle(WAIT)


def test_closing__tells_everyone() -> None:
    with serving(max_running=1, max_waiting=1) as (service, group):
        runs, waits = asked("runs", 1000), asked("waits", 1000)
        service.submit([runs[0]])
        started(service, 1)
        service.submit([waits[0]])
        group.allowed.release(1)
        closing = threading.Thread(target=service.close)
        closing.start()
        group.allowed.release(1)
        for _, inbox in (runs, waits):
            last = inbox.last()
            assert isinstance(last, ChoiceFailed)
            assert isinstance(last.error, Draining)
        closing.join(WAIT)
        assert service.num_running == service.num_waiting == 0


def test_closing_in_a_long_step__tells_everyone_and_waits_for_nothing() -> None:
    with serving(max_running=1, max_waiting=1) as (service, group):
        runs, waits = asked("runs", 1000), asked("waits", 1000)
        service.submit([runs[0]])
        started(service, 1)
        service.submit([waits[0]])
        assert not service.close(timeout_seconds=0.05)
        for _, inbox in (runs, waits):
            last = inbox.last()
            assert isinstance(last, ChoiceFailed)
            assert isinstance(last.error, Draining)
        assert service.wait_idle(0)
        assert not group.is_closed


def test_observers__are_told_of_each_choice_once() -> None:
    told: list[tuple[str, str]] = []

    class Listening(ServiceObserver):
        def on_queued(self, choice: CompletionChoice) -> None:
            told.append(("queued", choice.request_id))

        def on_started(self, choice: CompletionChoice) -> None:
            assert choice.started_at is not None
            told.append(("started", choice.request_id))

        def on_ended(self, choice: CompletionChoice) -> None:
            assert choice.ended_at is not None
            told.append((f"ended {choice.finish_reason}", choice.request_id))

        def on_rejected(self, error: Exception) -> None:
            told.append(("refused", type(error).__name__))

    with serving(max_running=1, max_waiting=1, observers=[Listening()]) as (service, group):
        first, second = asked("1", 1), asked("2", 1)
        service.submit([first[0]])
        started(service, 1)
        service.submit([second[0]])
        with pytest.raises(QueueFull):
            service.submit([asked()[0]])
        service.cancel([second[0]])
        group.allowed.release()
        first[1].last()
        assert service.wait_idle(WAIT)
    assert sorted(told) == sorted(
        [
            ("queued", "1"),
            ("started", "1"),
            ("queued", "2"),
            ("refused", "QueueFull"),
            ("ended abort", "2"),
            ("ended length", "1"),
        ]
    )


def test_observers__are_told_once_of_every_rest() -> None:
    told: list[str] = []
    rested = threading.Semaphore(0)

    class Listening(ServiceObserver):
        def on_ended(self, choice: CompletionChoice) -> None:
            told.append(choice.request_id)

        def on_idle(self) -> None:
            told.append("rested")
            rested.release()

    with serving(observers=[Listening()], idle_after_seconds=0.05) as (service, group):
        assert rested.acquire(timeout=WAIT)  # nobody has asked yet
        group.allowed.release(2)
        for name in ("1", "2"):
            choice, inbox = asked(name, 1)
            service.submit([choice])
            inbox.last()
            assert rested.acquire(timeout=WAIT)
        assert not rested.acquire(timeout=0.3)
    assert told == ["rested", "1", "rested", "2", "rested"]
