"""What every request passes before a route sees it: plain ASGI, from the outside in.

Nothing here reads a body that is too large, and nothing that a client may not see is told before
its key is accepted.
"""

import asyncio
import json
import logging
import re
import time
import uuid
from collections.abc import Iterable, Mapping
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from runtime.serving.config import is_loopback
from runtime.serving.errors import error_body
from runtime.serving.keys import Keys

log = logging.getLogger(__name__)

REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
"""Others could forge lines of a log, or fill it."""
OPEN_PATHS = frozenset({"/health", "/ready"})
"""What may be asked without a key: nothing about the model or its users is told there."""
PROBED = OPEN_PATHS | {"/metrics", "/status"}
"""What others ask for every few seconds, which would fill the log."""
BODY_SECONDS = 30.0
"""Time in which a request's body must have come."""
METHODS_WITH_BODY = frozenset({"POST", "PUT", "PATCH"})


def header(scope: Scope, name: bytes) -> bytes | None:
    """The first header of this (lower-case) name."""
    return next((value for key, value in scope["headers"] if key == name), None)


async def refuse(
    send: Send,
    status: int,
    message: str,
    *,
    kind: str = "invalid_request_error",
    code: str | None = None,
    headers: Mapping[str, str] | None = None,
) -> None:
    """Answers with an error in OpenAI's shape."""
    content = json.dumps(error_body(message, kind=kind, code=code)).encode()
    told = {"content-type": "application/json", "content-length": str(len(content))}
    told |= headers or {}
    raw = [(name.lower().encode(), value.encode()) for name, value in told.items()]
    await send({"type": "http.response.start", "status": status, "headers": raw})
    await send({"type": "http.response.body", "body": content})


class RequestLog:
    """Gives each request its id, tells it back, and writes one line when it is over.

    The client's own X-Request-Id is kept where it is a plain word. An exception that nothing below
    has caught is logged with it, and answered with 500.
    """

    def __init__(self, app: ASGIApp):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        shown = (header(scope, b"x-request-id") or b"").decode("latin-1")
        request_id = shown if REQUEST_ID.fullmatch(shown) else uuid.uuid4().hex
        fields: dict[str, Any] = {"request_id": request_id}
        scope.setdefault("state", {})["log"] = fields
        scope["state"]["request_id"] = request_id
        start = time.monotonic()
        status = 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [
                    *message.get("headers", ()),
                    (b"x-request-id", request_id.encode()),
                ]
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except Exception:
            # The outermost layer: the server goes on, the client is told, the log says where.
            log.exception("a request failed", extra={"fields": {"request_id": request_id}})
            if not status:
                await refuse(
                    send_with_id,
                    500,
                    f"the server failed; its log says more under request id {request_id}",
                    kind="server_error",
                )
        finally:
            fields |= {
                "method": scope["method"],
                "path": scope["path"],
                "status": status,
                "seconds": round(time.monotonic() - start, 6),
                "client": (scope.get("client") or ("",))[0],
            }
            level = logging.DEBUG if scope["path"] in PROBED and status < 400 else logging.INFO
            log.log(level, "request", extra={"fields": fields})


class HostCheck:
    """Answers only where this machine's own names are asked for.

    A page from elsewhere whose name is made to resolve to this machine (DNS rebinding) would else
    be of the same origin as a server without a key.
    """

    def __init__(self, app: ASGIApp, *, hosts: Iterable[str] = ()):
        self._app = app
        self._hosts = frozenset(one.lower() for one in hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            host = (header(scope, b"host") or b"").decode("latin-1")
            name = re.sub(r":\d+$", "", host).lower()
            if name and name not in self._hosts and not is_loopback(name):
                await refuse(
                    send,
                    403,
                    "this server has no key and answers only as localhost; set key=..., or "
                    "insecure=true behind a proxy that checks who asks",
                    kind="permission_error",
                )
                return
        await self._app(scope, receive, send)


class KeyCheck:
    """Every path but two needs a key, those that do not exist too."""

    def __init__(self, app: ASGIApp, *, keys: Keys):
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS:
            shown = header(scope, b"authorization") or b""
            if not self._keys.accept(shown):
                what = "the key is not one of this server's" if shown else "no key was shown"
                await refuse(
                    send,
                    401,
                    f"{what}; send the header 'Authorization: Bearer KEY'",
                    kind="authentication_error",
                    code="invalid_api_key",
                    headers={"www-authenticate": 'Basic realm="moecast", charset="UTF-8"'},
                )
                return
        await self._app(scope, receive, send)


class BodyLimit:
    """Reads the body, up to a limit and within a time, and hands it on; JSON only.

    That the type must be named keeps forms of other pages out: browsers send these unasked, but
    not as application/json.
    """

    def __init__(self, app: ASGIApp, *, max_bytes: int, seconds: float):
        self._app = app
        self._max_bytes = max_bytes
        self._seconds = seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] not in METHODS_WITH_BODY:
            await self._app(scope, receive, send)
            return
        told = header(scope, b"content-length") or b""
        if told.isdigit() and int(told[:20]) > self._max_bytes:
            await self._refuse_size(send)
            return
        kind = (header(scope, b"content-type") or b"").split(b";")[0].strip().lower()
        if kind != b"application/json":
            await refuse(send, 415, "the body must be JSON: send Content-Type: application/json")
            return
        content = bytearray()
        try:
            async with asyncio.timeout(self._seconds):
                more = True
                while more:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return
                    content += message.get("body", b"")
                    more = message.get("more_body", False)
                    if len(content) > self._max_bytes:
                        await self._refuse_size(send)
                        return
        except TimeoutError:
            late = f"the body did not come within {self._seconds:g} s"
            await refuse(send, 408, late, headers={"connection": "close"})
            return
        await self._app(scope, replay(bytes(content), receive), send)

    async def _refuse_size(self, send: Send) -> None:
        message = f"the body is larger than {self._max_bytes} bytes; raise max_body, or send less"
        await refuse(send, 413, message, headers={"connection": "close"})


def replay(content: bytes, receive: Receive) -> Receive:
    """Gives the whole body at once, then whatever comes."""
    is_given = False

    async def receive_again() -> Message:
        nonlocal is_given
        if is_given:
            return await receive()
        is_given = True
        return {"type": "http.request", "body": content, "more_body": False}

    return receive_again
