"""Few requests are parsed at once, whatever arrives together; health waits for none of them."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from starlette.types import Message, Receive, Scope, Send

from runtime.serving.middleware import BodyLimitMiddleware
from runtime.serving.parse_slots import LARGE_SLOTS, MAX_LARGE_BODIES, SMALL_BYTES, SMALL_SLOTS

LARGE = SMALL_BYTES + 1
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
            scope["state"]["parse_slot"].release()
            scope["state"]["parse_slot"].release()
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


@pytest.mark.parametrize(
    ("num_bytes", "limit"),
    [
        (0, SMALL_SLOTS),
        (1, SMALL_SLOTS),
        (SMALL_BYTES, SMALL_SLOTS),
        (LARGE, LARGE_SLOTS),
    ],
)
@pytest.mark.parametrize("path", ["/x", "/fails"])
def test_requests__are_parsed_few_at_once(num_bytes: int, limit: int, path: str) -> None:
    app = SlowApp()
    clients = [Client(num_bytes, path=path) for _ in range(30)]
    ask_all(app, clients)
    assert app.most == limit
    assert [client.statuses for client in clients] == [[200]] * 30
    assert app.num_bytes == 30 * num_bytes


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
    assert limited._slots.num_large_bodies == 0
