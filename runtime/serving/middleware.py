"""Middleware around the application, in plain ASGI: log, host check, authentication, body limit.

No middleware buffers a body beyond the limit, and nothing about the model is sent before the key is
accepted.
"""

import asyncio
import json
import logging
import re
import time
import uuid
from collections.abc import Mapping
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from runtime.serving.auth import ApiKeys
from runtime.serving.config import is_loopback
from runtime.serving.errors import ServerBusy, error_body
from runtime.serving.parse_slots import BUSY, ParseSlot, ParseSlots

log = logging.getLogger(__name__)

REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
"""Other request ids could forge lines of the log, or fill it."""
OPEN_PATHS = frozenset({"/health", "/ready"})
"""Paths without authentication; they reveal nothing about the model or its users."""
POLLED_PATHS = OPEN_PATHS | {"/metrics", "/status"}
"""Paths that monitoring polls every few seconds, which would fill the log."""
BODY_SECONDS = 30.0
"""Timeout for a request's body."""
METHODS_WITH_BODY = frozenset({"POST", "PUT", "PATCH"})


def read_header(scope: Scope, name: bytes) -> bytes | None:
    """The first header of this (lower-case) name."""
    return next((value for key, value in scope["headers"] if key == name), None)


async def send_error(
    send: Send,
    status: int,
    message: str,
    *,
    kind: str = "invalid_request_error",
    code: str | None = None,
    headers: Mapping[str, str] | None = None,
) -> None:
    """Send an error in OpenAI's shape."""
    content = json.dumps(error_body(message, kind=kind, code=code)).encode()
    fields = {"content-type": "application/json", "content-length": str(len(content))}
    fields |= headers or {}
    raw = [(name.lower().encode(), value.encode()) for name, value in fields.items()]
    await send({"type": "http.response.start", "status": status, "headers": raw})
    await send({"type": "http.response.body", "body": content})


class RequestLogMiddleware:
    """Gives each request an id, returns it as a header, and logs one line when the request ends.

    Keeps the client's X-Request-Id if it is safe to log. Logs an exception that nothing below has
    caught, and answers it with 500.
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

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                own = (b"x-request-id", request_id.encode())
                message["headers"] = [*message.get("headers", ()), own]
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except Exception:
            # The outermost layer: one failed request must not end the server.
            log.exception("a request failed", extra={"fields": {"request_id": request_id}})
            if not status:
                message = failure_message(request_id)
                await send_error(send_with_id, 500, message, kind="server_error")
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
                await send_error(
                    send,
                    403,
                    "a server without a key accepts the host localhost only; set api_key=..., or "
                    "insecure=true behind a proxy that authenticates clients",
                    kind="permission_error",
                )
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
                await send_error(
                    send,
                    401,
                    f"{problem}; send the header 'Authorization: Bearer KEY'",
                    kind="authentication_error",
                    code="invalid_api_key",
                    headers={"www-authenticate": 'Basic realm="moecast", charset="UTF-8"'},
                )
                return
        await self._app(scope, receive, send)


class BodyLimitMiddleware:
    """Reads the whole body, up to a size and within a timeout; accepts JSON only.

    Requiring the content type blocks forms of other web pages: browsers send them without asking,
    but not as application/json.

    The application is called when the request has a slot (`runtime.serving.parse_slots`). Its
    answer releases the slot; a route that parses first and answers much later releases
    `request.state.parse_slot` in between.
    """

    def __init__(self, app: ASGIApp, *, max_bytes: int, timeout_seconds: float):
        self._app, self._max_bytes, self._timeout_seconds = app, max_bytes, timeout_seconds
        self._slots = ParseSlots()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        slot = ParseSlot(self._slots)

        async def send_and_release(message: Message) -> None:
            slot.release()
            await send(message)

        try:
            content = b""
            if scope["method"] in METHODS_WITH_BODY:
                received = await self._read(scope, receive, send, slot)
                if received is None:
                    return
                content = received
            if await slot.wait(receive):
                scope.setdefault("state", {})["parse_slot"] = slot
                again = replay_body(content, receive)
                content = received = b""  # large bodies are freed once they are parsed
                await self._app(scope, again, send_and_release)
        finally:
            slot.release()

    async def _read(
        self, scope: Scope, receive: Receive, send: Send, slot: ParseSlot
    ) -> bytes | None:
        """The body; None once an error has been sent, or if the client has disconnected."""
        length = read_header(scope, b"content-length") or b""
        if length.isdigit() and int(length[:20]) > self._max_bytes:
            await self._send_too_large(send)
            return None
        kind = (read_header(scope, b"content-type") or b"").split(b";")[0].strip().lower()
        if kind != b"application/json":
            problem = "the body must be JSON: send Content-Type: application/json"
            await send_error(send, 415, problem)
            return None
        content = bytearray()
        try:
            async with asyncio.timeout(self._timeout_seconds) as slot.deadline:
                more = True
                while more:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return None
                    piece = message.get("body", b"")
                    more = message.get("more_body", False)
                    if len(content) + len(piece) > self._max_bytes:
                        await self._send_too_large(send)
                        return None
                    slot.add(len(piece))
                    content += piece
        except (TimeoutError, ServerBusy) as error:
            slot.deadline = None
            if slot.is_displaced or isinstance(error, ServerBusy):
                await self._send_busy(send)
            else:
                late = f"the body did not arrive within {self._timeout_seconds:g} s"
                await send_error(send, 408, late, headers={"connection": "close"})
            return None
        slot.deadline = None
        return bytes(content)

    async def _send_busy(self, send: Send) -> None:
        busy = ServerBusy(BUSY)
        headers = {"connection": "close", "retry-after": str(busy.retry_after_seconds)}
        await send_error(
            send, busy.status, str(busy), kind=busy.kind, code=busy.code, headers=headers
        )

    async def _send_too_large(self, send: Send) -> None:
        message = f"the body is larger than {self._max_bytes} bytes; raise max_body, or send less"
        await send_error(send, 413, message, headers={"connection": "close"})


def replay_body(content: bytes, receive: Receive) -> Receive:
    """A receive function that returns the whole body first, then what `receive` returns."""
    message: Message | None = {"type": "http.request", "body": content, "more_body": False}
    del content

    async def receive_again() -> Message:
        nonlocal message
        first, message = message, None
        return first or await receive()

    return receive_again
