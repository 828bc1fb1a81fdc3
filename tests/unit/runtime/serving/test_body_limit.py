"""Few requests are parsed at once, whatever arrives together; health waits for none of them."""

import asyncio
from collections.abc import Awaitable, Callable
from itertools import pairwise
from typing import Any

import pytest
from starlette.types import Message, Receive, Scope, Send

from runtime.serving.edge.body_limit import (
    MAX_LARGE_BODIES,
    PARSED_AT_ONCE,
    PAUSE_SECONDS,
    SMALL_BYTES,
    BodyLimitMiddleware,
    BodySize,
)

LARGE = SMALL_BYTES + 1
SMALL_SLOTS, LARGE_SLOTS = PARSED_AT_ONCE[BodySize.SMALL], PARSED_AT_ONCE[BodySize.LARGE]
OK = {"type": "http.response.start", "status": 200, "headers": []}


class SlowApp:
    """Counts the requests that it has at once; answers after as many rounds of the event loop."""

    def __init__(self, *, early_release: bool = False):
        self.num_running = self.most = self.num_calls = self.num_bytes = 0
        self._early_release = early_release

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.num_calls += 1
        self.num_bytes += len((await receive()).get("body", b""))
        self.num_running += 1
        self.most = max(self.most, self.num_running)
        if self._early_release:
            scope["state"]["parse_turn"].release()
            scope["state"]["parse_turn"].release()
        for _ in range(5):
            await asyncio.sleep(0)
        await send(dict(OK))
        self.num_running -= 1
        if scope["path"] == "/fails":
            raise ValueError("after the answer began")


class Client:
    """One request; it has left once its body is sent if `leaves`."""

    def __init__(self, num_bytes: int, *, leaves: bool = False, path: str = "/x"):
        self.statuses: list[int] = []
        self._body, self._leaves, self._path = b"x" * num_bytes, leaves, path
        self._is_sent = False

    async def receive(self) -> Message:
        if not self._is_sent:
            self._is_sent = True
            return {"type": "http.request", "body": self._body, "more_body": False}
        if self._leaves:
            return {"type": "http.disconnect"}
        return await asyncio.Future()

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.statuses.append(message["status"])

    def ask(self, app: Callable[..., Awaitable[None]]) -> Awaitable[None]:
        headers = [(b"content-type", b"application/json")]
        method = "POST" if self._body else "GET"
        scope: Any = {"type": "http", "method": method, "path": self._path, "headers": headers}
        return app(scope, self.receive, self.send)


def ask_all(app: SlowApp, clients: list[Client]) -> BodyLimitMiddleware:
    limited = BodyLimitMiddleware(app, max_bytes=1 << 20, timeout_seconds=60)

    async def run() -> None:
        asks = (client.ask(limited) for client in clients)
        await asyncio.wait_for(asyncio.gather(*asks, return_exceptions=True), 60)

    asyncio.run(run())
    return limited


LIMITS = [(0, SMALL_SLOTS), (SMALL_BYTES, SMALL_SLOTS), (LARGE, LARGE_SLOTS)]


@pytest.mark.parametrize(("num_bytes", "limit"), LIMITS)
@pytest.mark.parametrize("path", ["/x", "/fails"])
def test_requests__are_parsed_few_at_once(num_bytes: int, limit: int, path: str) -> None:
    app = SlowApp()
    number = MAX_LARGE_BODIES if num_bytes > SMALL_BYTES else 30
    clients = [Client(num_bytes, path=path) for _ in range(number)]
    ask_all(app, clients)
    assert app.most == limit
    assert [client.statuses for client in clients] == [[200]] * number
    assert app.num_bytes == number * num_bytes


def test_slot__is_given_back_before_a_slow_answer() -> None:
    app = SlowApp(early_release=True)
    ask_all(app, [Client(10) for _ in range(30)])
    assert app.most == 30


def test_health__waits_for_nobody() -> None:
    app = SlowApp()
    ask_all(app, [Client(0, path="/health") for _ in range(30)])
    assert app.most == 30


def test_clients_that_left_while_they_waited__are_not_served() -> None:
    app = SlowApp()
    clients = [Client(LARGE), *(Client(LARGE, leaves=True) for _ in range(9))]
    ask_all(app, [*clients, Client(LARGE)])
    assert app.num_calls == 2


def test_large_bodies__are_few_at_once_and_counted_again_afterwards() -> None:
    app = SlowApp()
    clients = [Client(LARGE) for _ in range(MAX_LARGE_BODIES + 5)]
    limited = ask_all(app, clients)
    statuses = [client.statuses[0] for client in clients]
    assert sorted(statuses) == [200] * MAX_LARGE_BODIES + [503] * 5
    assert not limited._large_bodies


@pytest.mark.parametrize("num_bytes", [1, LARGE])
def test_waiting_requests__leave_rounds_of_the_event_loop_to_others(num_bytes, monkeypatch):
    for size in BodySize:
        monkeypatch.setitem(PAUSE_SECONDS, size, 0.02)
    num_rounds = 0
    seen: list[int] = []

    async def app(_scope: Scope, _receive: Receive, send: Send) -> None:
        seen.append(num_rounds)
        await asyncio.sleep(0)
        await send(dict(OK))

    async def count_rounds() -> None:
        nonlocal num_rounds
        while True:
            await asyncio.sleep(0)
            num_rounds += 1

    async def run() -> None:
        limited = BodyLimitMiddleware(app, max_bytes=1 << 20, timeout_seconds=60)
        counting = asyncio.ensure_future(count_rounds())
        await asyncio.gather(*(Client(num_bytes).ask(limited) for _ in range(3 * SMALL_SLOTS)))
        counting.cancel()

    asyncio.run(asyncio.wait_for(run(), 60))
    num_slots = SMALL_SLOTS if num_bytes == 1 else LARGE_SLOTS
    starts = seen[::num_slots]
    assert all(later - start >= 10 for start, later in pairwise(starts))


class SlowSender(Client):
    """Announces more than it sends."""

    async def receive(self) -> Message:
        if self._is_sent:
            return await asyncio.Future()
        return {**await super().receive(), "more_body": True}


def test_large_bodies_that_never_end__keep_no_other_from_the_server() -> None:
    app = SlowApp()
    slow = [SlowSender(LARGE) for _ in range(MAX_LARGE_BODIES)]
    quick = [Client(LARGE) for _ in range(3)]
    limited = BodyLimitMiddleware(app, max_bytes=1 << 20, timeout_seconds=60)

    async def run() -> None:
        reads = [asyncio.ensure_future(client.ask(limited)) for client in slow]
        await asyncio.sleep(0)
        for client in quick:
            await client.ask(limited)
        await reads[0]
        assert not any(read.done() for read in reads[1:])
        for read in reads:
            read.cancel()
        await asyncio.gather(*reads, return_exceptions=True)

    asyncio.run(asyncio.wait_for(run(), 60))
    assert [client.statuses for client in quick] == [[200]] * 3
    assert [client.statuses for client in slow] == [[503]] + [[]] * (MAX_LARGE_BODIES - 1)
    assert not limited._large_bodies
