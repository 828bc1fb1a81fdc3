"""Middleware around the application, in plain ASGI: log, host check, authentication.

Nothing about the model is sent before the key is accepted.
"""

import asyncio
import logging
import re
import time
import uuid
from contextlib import suppress
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from runtime.serving.auth import ApiKeys
from runtime.serving.config import is_loopback
from runtime.serving.errors import (
    ForbiddenHost,
    InvalidKey,
    ServerFault,
    error_response,
)

log = logging.getLogger(__name__)

REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
"""Other request ids could forge lines of the log, or fill it."""
OPEN_PATHS = frozenset({"/health", "/ready"})
"""Paths without authentication; they reveal nothing about the model or its users."""
POLLED_PATHS = OPEN_PATHS | {"/metrics", "/status"}
"""Paths that monitoring polls every few seconds, which would fill the log."""
DISCARD_SECONDS = 1.0
"""Time for the rest of a body whose request is answered already. Many clients read no answer before
they have sent everything, and a connection that is closed before would destroy it."""
CLOSE = (b"connection", b"close")
LENGTHS = (b"content-length", b"transfer-encoding")


def read_header(scope: Scope, name: bytes) -> bytes | None:
    """The first header of this (lower-case) name."""
    return next((value for key, value in scope["headers"] if key == name), None)


class RequestLogMiddleware:
    """Gives each request an id, returns it as a header, and logs one line when the request ends.

    Keeps the client's X-Request-Id if it is safe to log. Logs an exception that nothing below has
    caught, and answers it with 500. An answer that precedes the end of its request's body closes
    the connection, and so does one to a request with two lengths: another server on the way may
    have read it differently, and take what follows for a request (RFC 9112, 6.1).
    """

    def __init__(self, app: ASGIApp):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = (read_header(scope, b"x-request-id") or b"").decode("latin-1")
        request_id = given if REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
        fields: dict[str, Any] = {"request_id": request_id}
        scope.setdefault("state", {})["log"] = fields
        scope["state"]["request_id"] = request_id
        start = time.monotonic()
        status = 0
        length, coding = (read_header(scope, name) for name in LENGTHS)
        is_complete = not coding and length in (None, b"0")

        async def receive_and_note() -> Message:
            nonlocal is_complete
            message = await receive()
            is_complete = not message.get("more_body", False)
            return message

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = [*message.get("headers", ()), (b"x-request-id", request_id.encode())]
                if not (is_complete or read_header(scope, b"expect")):
                    await discard_body(receive_and_note)
                if not is_complete or (length and coding):
                    headers.append(CLOSE)
                message["headers"] = headers
            await send(message)

        try:
            await self._app(scope, receive_and_note, send_with_id)
        except Exception:
            # The outermost layer: one failed request must not end the server.
            log.exception("a request failed", extra={"fields": {"request_id": request_id}})
            if not status:
                failure = error_response(ServerFault(failure_message(request_id)))
                await failure(scope, receive, send_with_id)
        finally:
            fields |= {
                "method": scope["method"],
                "path": scope["path"],
                "status": status,
                "seconds": round(time.monotonic() - start, 6),
                "client": (scope.get("client") or ("",))[0],
            }
            is_quiet = scope["path"] in POLLED_PATHS and status < 400
            level = logging.DEBUG if is_quiet else logging.INFO
            log.log(level, "request", extra={"fields": fields})


async def discard_body(receive: Receive) -> None:
    with suppress(TimeoutError):
        async with asyncio.timeout(DISCARD_SECONDS):
            while (await receive()).get("more_body", False):
                pass


def failure_message(request_id: str) -> str:
    return f"internal error; the server's log has the details of request {request_id}"


class HostCheckMiddleware:
    """Rejects requests whose Host header is not a name of this machine.

    Otherwise a web page whose name resolves to this machine (DNS rebinding) would share its origin
    with a server that needs no key.
    """

    def __init__(self, app: ASGIApp):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            host = (read_header(scope, b"host") or b"").decode("latin-1")
            name = re.sub(r":\d+$", "", host).lower()
            if name and not is_loopback(name):
                error = ForbiddenHost(
                    "a server without a key accepts the host localhost only; set api_key=..., or "
                    "insecure=true behind a proxy that authenticates clients"
                )
                await error_response(error)(scope, receive, send)
                return
        await self._app(scope, receive, send)


class AuthMiddleware:
    """Requires a key on every path except `OPEN_PATHS`, including paths that do not exist."""

    def __init__(self, app: ASGIApp, *, keys: ApiKeys):
        self._app, self._keys = app, keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS:
            authorization = read_header(scope, b"authorization") or b""
            if not self._keys.accept(authorization):
                problem = "invalid API key" if authorization else "missing API key"
                error = InvalidKey(f"{problem}; send the header 'Authorization: Bearer KEY'")
                response = error_response(error)
                response.headers["www-authenticate"] = 'Basic realm="moecast", charset="UTF-8"'
                await response(scope, receive, send)
                return
        await self._app(scope, receive, send)
