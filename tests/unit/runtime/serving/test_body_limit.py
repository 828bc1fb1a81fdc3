"""Few requests are parsed at once, whatever arrives together; health waits for none of them."""

import asyncio
from collections.abc import Awaitable, Sequence
from functools import partial
from itertools import chain, pairwise, repeat
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from runtime.serving.edge import body_limit
from runtime.serving.edge.body_limit import MAX_LARGE_BODIES, BodyLimitMiddleware, BodySize

LARGE = body_limit.SMALL_BYTES + 1
SLOTS = body_limit.PARSED_AT_ONCE
OK = {"type": "http.response.start", "status": 200, "headers": []}
LEFT = {"type": "http.disconnect"}
JSON = [(b"content-type", b"application/json")]


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
        for _ in range(2 * self._early_release):
            scope["state"]["parse_turn"].release()
        for _ in range(5):
            await asyncio.sleep(0)
        await send(dict(OK))
        self.num_running -= 1
        if scope["path"] == "/fails":
            raise ValueError("after the answer began")


class Client:
    """One request.

    Args:
        leaves: Its client leaves once the body is sent.
        is_slow: It announces more than it sends.
    """

    def __init__(self, num_bytes: int, *, leaves=False, is_slow=False, path="/x"):
        self.statuses: list[int] = []
        self._scope = {"type": "http", "method": "POST" if num_bytes else "GET", "path": path}
        request = {"type": "http.request", "body": b"x" * num_bytes, "more_body": is_slow}
        self._messages = chain([request], repeat(LEFT) if leaves else ())

    async def receive(self) -> Message:
        for message in self._messages:
            return message
        return await asyncio.Future()

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.statuses.append(message["status"])

    def ask(self, app: ASGIApp) -> Awaitable[None]:
        return app({**self._scope, "headers": [*JSON]}, self.receive, self.send)


limit = partial(BodyLimitMiddleware, max_bytes=1 << 20, timeout_seconds=60)


def ask_all(app: ASGIApp, clients: Sequence[Any]) -> BodyLimitMiddleware:
    limited = limit(app)

    async def run() -> None:
        await asyncio.gather(*(client.ask(limited) for client in clients), return_exceptions=True)

    asyncio.run(asyncio.wait_for(run(), 60))
    return limited


SMALL = [(size, 30, SLOTS[BodySize.SMALL]) for size in (0, body_limit.SMALL_BYTES)]
KINDS = [*SMALL, (LARGE, MAX_LARGE_BODIES, SLOTS[BodySize.LARGE])]


@pytest.mark.parametrize(("num_bytes", "number", "slots"), KINDS)
@pytest.mark.parametrize("path", ["/x", "/fails"])
def test_requests__are_parsed_few_at_once(num_bytes, number, slots, path):
    app, clients = SlowApp(), [Client(num_bytes, path=path) for _ in range(number)]
    ask_all(app, clients)
    assert [client.statuses for client in clients] == [[200]] * number
    assert (app.most, app.num_bytes) == (slots, number * num_bytes)


@pytest.mark.parametrize(("early_release", "path"), [(True, "/x"), (False, "/health")])
def test_slots__keep_neither_slow_answers_nor_health_waiting(early_release, path):
    app = SlowApp(early_release=early_release)
    ask_all(app, [Client(10 * early_release, path=path) for _ in range(30)])
    assert app.most == 30


def test_clients_that_left_while_they_waited__are_not_served() -> None:
    app, left = SlowApp(), [Client(LARGE, leaves=True) for _ in range(9)]
    ask_all(app, [Client(LARGE), *left, Client(LARGE)])
    assert app.num_calls == 2


def test_large_bodies__are_few_at_once_and_counted_again_afterwards() -> None:
    clients = [Client(LARGE) for _ in range(MAX_LARGE_BODIES + 5)]
    limited = ask_all(SlowApp(), clients)
    assert sorted(client.statuses[0] for client in clients) == [200] * MAX_LARGE_BODIES + [503] * 5
    assert not limited._large_bodies


@pytest.mark.parametrize(("num_bytes", "size"), [(1, BodySize.SMALL), (LARGE, BodySize.LARGE)])
def test_waiting_requests__leave_rounds_of_the_event_loop_to_others(num_bytes, size, monkeypatch):
    monkeypatch.setattr(body_limit, "PAUSE_SECONDS", dict.fromkeys(BodySize, 0.02))
    num_rounds, seen = 0, []

    async def app(_scope: Scope, _receive: Receive, send: Send) -> None:
        seen.append(num_rounds)
        await asyncio.sleep(0)
        await send(dict(OK))

    async def count_rounds(_limited: ASGIApp) -> None:
        nonlocal num_rounds
        while len(seen) < len(clients):
            await asyncio.sleep(0)
            num_rounds += 1

    clients = [Client(num_bytes) for _ in range(3 * SLOTS[BodySize.SMALL])]
    ask_all(app, [*clients, SimpleNamespace(ask=count_rounds)])
    assert all(later - start >= 10 for start, later in pairwise(seen[:: SLOTS[size]]))


def test_large_bodies_that_never_end__keep_no_other_from_the_server() -> None:
    slow = [Client(LARGE, is_slow=True) for _ in range(MAX_LARGE_BODIES)]
    quick = [Client(LARGE) for _ in range(3)]
    limited = limit(SlowApp())

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
