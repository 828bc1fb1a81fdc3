"""Disconnects, full queues, shutdowns and failures affect only their own requests."""

import gc
import json
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import Mock

import httpx2
import openai
import pytest

from runtime.errors import CheckpointError
from runtime.generation.lockstep.sequence import SequenceTask
from runtime.serving.api.output_stream import OutputStream
from runtime.serving.choice import CompletionChoice
from runtime.serving.errors import EngineDead
from runtime.serving.service import GenerationService, ServiceObserver, ServiceState
from tests.builders.plain_answers import PlainAnswers
from tests.builders.served import count_pins
from tests.builders.serving import PROMPTS, RunningServer, running_server, tiny
from tests.builders.waiting import wait_for
from tests.unit.runtime.serving.test_connections import post
from tests.unit.runtime.serving.test_rejections import error_of

LONG = {"prompt": "The", "max_tokens": 2000, "temperature": 0}
PATIENCE = 240.0


def ask_all(server: RunningServer, number: int) -> list[httpx2.Response]:
    """Send all prompts at once, each from its own thread."""
    bodies = [{"prompt": prompt, "max_tokens": number, "temperature": 0} for prompt in PROMPTS]
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        return list(pool.map(lambda body: server.post("/v1/completions", json=body), bodies))


def text_of(answer: httpx2.Response) -> str:
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["text"]


def count_accepted(server: RunningServer) -> int:
    return server.service.num_running + server.service.num_waiting


def pinned(server: RunningServer) -> int:
    return count_pins(server.service.loaded.model.moecast.engine)


# ---- clients that disconnect


@pytest.fixture
def held(folder: Path) -> Iterator[RunningServer]:
    """A server whose steps wait until the test releases them."""
    with running_server(lambda: tiny(folder), max_running=2, max_waiting=2) as server:
        server.steps.hold()
        yield server


def ask_without_reading(server: RunningServer, body: dict[str, object]):
    """Ask for a completion on a connection that the caller closes."""
    return server.connect(post("/v1/completions", json.dumps(body).encode()))


@pytest.mark.parametrize("stream", [False, True])
def test_disconnect__ends_the_generation_within_a_step(held: RunningServer, stream: bool) -> None:
    connection = ask_without_reading(held, {**LONG, "stream": stream})
    wait_for(lambda: held.steps.num_steps == 1)
    (choice,) = held.steps.of("started")
    connection.close()
    wait_for(lambda: choice.is_cancelled)
    num_tokens = choice.num_tokens
    held.steps.release()
    wait_for(lambda: not count_accepted(held))
    assert (choice.num_tokens, choice.finish_reason) == (num_tokens, "abort")
    assert pinned(held) == 0


def test_disconnect__frees_the_place_of_a_waiting_answer_at_once(held: RunningServer) -> None:
    with ask_without_reading(held, LONG):
        wait_for(lambda: held.steps.num_steps == 1)
        with ask_without_reading(held, LONG):
            wait_for(lambda: held.service.num_waiting == 1)
        wait_for(lambda: held.service.num_waiting == 0)
        assert held.steps.num_steps == 1


# ---- full queue


def test_full_queue__rejects_at_once_and_keeps_accepted_requests(held: RunningServer) -> None:
    with ThreadPoolExecutor(4) as pool, held.http() as client:
        body = {**LONG, "max_tokens": 2}
        taken = [pool.submit(client.post, "/v1/completions", json=body) for _ in range(3)]
        wait_for(lambda: count_accepted(held) == 3)
        # All answers of a request are taken, or none.
        assert client.post("/v1/completions", json=body | {"n": 2}).status_code == 429
        taken.append(pool.submit(client.post, "/v1/completions", json=body))
        wait_for(lambda: count_accepted(held) == 4)
        rejected = client.post("/v1/completions", json=LONG)
        assert error_of(rejected, 429)["code"] == "queue_full"
        assert int(rejected.headers["retry-after"]) >= 1
        chat = {"messages": [{"role": "user", "content": "hi"}]}
        assert client.post("/v1/chat/completions", json=chat).status_code == 429
        with pytest.raises(openai.RateLimitError):
            held.openai().completions.create(model="tiny", prompt="a")
        assert client.get("/health").status_code == 200
        held.steps.release()
        assert [future.result().status_code for future in taken] == [200] * 4
    wait_for(lambda: not count_accepted(held))
    events = Counter(event for event, _ in held.steps.events)
    assert events == {"queued": 4, "started": 4, "ended": 4, "rejected": 4}


# ---- shutdown and failures


@contextmanager
def three_clients(server, body) -> Iterator[tuple[httpx2.Client, list[Future[httpx2.Response]]]]:
    """Another client, and the answers to three, the second's a stream, which are accepted."""
    with ThreadPoolExecutor(3) as pool, server.http() as client:
        bodies = [{**body, "stream": stream} for stream in (False, True, False)]
        taken = [pool.submit(client.post, "/v1/completions", json=one) for one in bodies]
        wait_for(lambda: count_accepted(server) == 3)
        yield client, taken


def test_shutdown__finishes_accepted_requests_and_rejects_new_ones(folder: Path) -> None:
    with running_server(lambda: tiny(folder), max_running=1, max_waiting=2) as server:
        server.steps.hold()
        with three_clients(server, LONG | {"max_tokens": 5}) as (client, taken):
            server.end()
            wait_for(lambda: client.get("/ready").status_code == 503)
            assert client.get("/health").status_code == 200
            late = client.post("/v1/completions", json=LONG)
            assert error_of(late, 503)["code"] == "shutting_down"
            assert late.headers["retry-after"]
            server.steps.release()
            answers = [future.result() for future in taken]
        assert [answer.status_code for answer in answers] == [200] * 3
        assert answers[1].text.endswith("data: [DONE]\n\n")
        assert all("error" not in answer.text for answer in answers)
        server.wait_end()


@pytest.mark.parametrize(("grace", "requests"), [(0.0, 1), (60.0, 2)])
def test_immediate_shutdown__fails_open_requests(folder: Path, grace: float, requests: int) -> None:
    with running_server(lambda: tiny(folder), max_running=1, grace_seconds=grace) as server:
        with three_clients(server, LONG) as (_, taken):
            for _ in range(requests):
                server.end()
            answers = [future.result() for future in taken]
        ends = [one.text.removesuffix("data: [DONE]\n\n").split("data: ")[-1] for one in answers]
        errors = [json.loads(end)["error"]["code"] for end in ends]
        assert errors == ["shutting_down"] * 3
        assert {answer.status_code for answer in answers} == {503, 200}
        server.wait_end()


def test_failed_load__rejects_requests_with_its_error() -> None:
    missing = Mock(side_effect=CheckpointError("no such model"))
    service = GenerationService(missing, max_running=1, max_waiting=1)
    service.start()
    wait_for(lambda: service.state is ServiceState.FAILED)
    assert isinstance(service.error, CheckpointError)
    with pytest.raises(EngineDead, match="no such model"):
        service.require_capacity()
    assert service.close(timeout_seconds=PATIENCE)


def test_on_idle__is_called_once_per_idle_period(folder: Path) -> None:
    became_idle, observer = threading.Semaphore(0), ServiceObserver()
    observer.on_idle = became_idle.release  # type: ignore[method-assign]
    idle = {"install": lambda service: service.add_observer(observer), "idle_after_seconds": 0.1}
    with running_server(lambda: tiny(folder), **idle) as server, server.http() as client:
        assert became_idle.acquire(timeout=PATIENCE)
        for _ in range(2):
            client.post("/v1/completions", json={"prompt": "a", "max_tokens": 2})
            assert became_idle.acquire(timeout=PATIENCE)
        assert not became_idle.acquire(timeout=0.3)


def test_loading__is_healthy_but_not_ready(folder: Path) -> None:
    go_on, slow = threading.Event(), lambda: go_on.wait(PATIENCE) and tiny(folder)
    with running_server(slow, ready=False) as server, server.http() as client:
        assert client.get("/health").status_code == 200
        for path in ("/ready", "/v1/models", "/v1/models/tiny"):
            assert client.get(path).status_code == 503
        answer = client.post("/v1/completions", json={"prompt": "a"})
        assert error_of(answer, 503)["code"] == "loading"
        go_on.set()
        wait_for(lambda: client.get("/ready").status_code == 200)
        assert client.post("/v1/completions", json={"prompt": "a"}).status_code == 200


def test_engine_failure__is_503_and_ends_the_server(folder: Path) -> None:
    with running_server(lambda: tiny(folder)) as server:
        broken = Mock(side_effect=RuntimeError("broken"))
        server.service.loaded.group.step = broken  # type: ignore[method-assign]
        answer = server.post("/v1/completions", json={"prompt": "a"})
        assert error_of(answer, 503)["code"] == "engine_dead"
        server.wait_end()
        assert str(server.service.error) == "broken"


def test_kv_caches__stay_within_their_budget(folder: Path, plain: PlainAnswers) -> None:
    """With room for 64 tokens, two or three answers of 20 tokens run together."""
    wanted = plain.texts(PROMPTS, 20)
    seen: list[Sequence[CompletionChoice]] = []
    with running_server(lambda: tiny(folder, kv_budget="8KiB")) as server:
        kv_budget = server.service.loaded.info.kv_budget
        server.steps.after_step = seen.append
        server.steps.hold()
        with ThreadPoolExecutor(1) as pool:
            answers = pool.submit(ask_all, server, 20)
            wait_for(lambda: count_accepted(server) == len(PROMPTS))
            server.steps.release()
        assert [text_of(answer) for answer in answers.result()] == wanted
        assert max(map(len, seen)) > 1
        assert all(kv_budget.fits(one.max_cached_tokens for one in choices) for choices in seen)
        queued, started = server.steps.of("queued"), server.steps.of("started")
        assert queued == started, "a short answer passes no long one that waits"


def request_objects() -> set[int]:
    """Ids of the objects that belong to requests."""
    types = CompletionChoice, OutputStream, SequenceTask
    return {id(thing) for thing in gc.get_objects() if type(thing) in types}


def test_requests__are_freed_without_the_cycle_collector(folder: Path) -> None:
    """With half a million live objects, the cycle collector may run minutes later."""
    body = {"prompt": "The", "max_tokens": 4, "n": 2, "logprobs": 1}
    with running_server(lambda: tiny(folder), max_running=2, max_waiting=2) as server:
        gc.collect()
        before = request_objects()
        gc.disable()
        try:
            with server.http() as client:
                for more in ({}, {"n": 4}, {"stream": True}, {"prompt": ["a"] * 3}):
                    answer = client.post("/v1/completions", json=body | more)
                    assert answer.status_code == (400 if "prompt" in more else 200)
                    assert server.service.wait_idle(PATIENCE)
                with client.stream("POST", "/v1/completions", json=LONG | {"stream": True}) as gone:
                    next(gone.iter_lines())
            assert server.service.wait_idle(PATIENCE)

            def are_freed() -> bool:
                server.steps.events.clear()
                return request_objects() <= before

            wait_for(are_freed, "the last response's task ends, and its objects are freed")
        finally:
            gc.enable()
