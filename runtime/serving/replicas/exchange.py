"""One HTTP request, carried to an application in another process and its answer back."""

import asyncio
import logging
from collections.abc import AsyncIterator, MutableMapping
from dataclasses import dataclass
from typing import Any

from starlette.types import ASGIApp

log = logging.getLogger(__name__)

LEAVE_SECONDS = 5.0
"""Time that an application is given to notice that its client has gone."""


@dataclass(frozen=True, kw_only=True)
class Wire:
    """The request, whole."""

    method: str
    path: str
    query: bytes
    headers: list[tuple[bytes, bytes]]
    body: bytes
    client: tuple[str, int] | None = None

    def scope(self) -> dict[str, Any]:
        return {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": self.method,
            "scheme": "http",
            "path": self.path,
            "raw_path": self.path.encode(),
            "query_string": self.query,
            "root_path": "",
            "headers": self.headers,
            "client": self.client,
            "server": None,
            "state": {},
        }


async def exchanged(app: ASGIApp, wire: Wire) -> AsyncIterator[MutableMapping[str, Any]]:
    """The application's messages as it sends them.

    When nobody takes the next one, the application is told that its client has gone.
    """
    messages: asyncio.Queue[MutableMapping[str, Any] | None] = asyncio.Queue()
    gone = asyncio.Event()
    pending = [wire.body]

    async def receive() -> dict[str, Any]:
        if pending:
            return {"type": "http.request", "body": pending.pop(), "more_body": False}
        await gone.wait()
        return {"type": "http.disconnect"}

    task = asyncio.ensure_future(app(wire.scope(), receive, messages.put))
    task.add_done_callback(lambda _: messages.put_nowait(None))
    has_begun = False
    try:
        while (message := await messages.get()) is not None:
            has_begun = True
            yield message
        if not task.cancelled() and (error := task.exception()) is not None:
            if not has_begun:
                raise error
            log.warning("an answer ended in an error: %s", error)
    finally:
        gone.set()
        if not task.done():
            await asyncio.wait({task}, timeout=LEAVE_SECONDS)
            task.cancel()
