"""Middleware around the application, in plain ASGI: log, paths, host check, API keys.

Nothing about the model is sent before the key is accepted.
"""

import asyncio
import base64
import binascii
import hashlib
import hmac
import logging
import re
import time
import uuid
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any
from urllib.parse import quote

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from predictors.errors import MoecastError
from predictors.files import expand_home, read_text_file
from runtime.serving.config import is_loopback
from runtime.serving.errors import ErrorAnswer, InvalidKey, RequestError, ServerFault

KEY_VARIABLE = "MOECAST_API_KEY"
FILE_PREFIX = "@"


def load_api_keys(key: str | None, environment: Mapping[str, str]) -> frozenset[str]:
    """The configured keys; empty if there are none.

    Args:
        key: keys separated by commas, or @FILE with one on each line; None: the environment's.

    Raises:
        MoecastError: the option is set but holds no key, or one that no header can carry.
    """
    source = "api_key"
    if key is None:
        source, key = KEY_VARIABLE, environment.get(KEY_VARIABLE)
    if key is None:
        return frozenset()
    if key.startswith(FILE_PREFIX):
        path = expand_home(key[1:])
        try:
            text = read_text_file(path)
        except (OSError, MoecastError) as error:
            raise MoecastError(f"{source}=@{path}: cannot read the file ({error})") from error
        entries = text.splitlines()
    else:
        entries = key.split(",")
    keys = frozenset(entry.strip() for entry in entries) - {""}
    if not keys:
        raise MoecastError(f"{source} is set but holds no key; set a key, or leave it out")
    if any(not entry.isascii() or not entry.isprintable() or " " in entry for entry in keys):
        raise MoecastError(
            f"{source}: a key has characters that an HTTP header cannot carry; use ASCII letters "
            "and digits"
        )
    return keys


class ApiKeys:
    """Keeps digests of the keys only, and compares with all of them in constant time."""

    def __init__(self, keys: Iterable[str]):
        self._digests = [digest(key.encode()) for key in keys]

    def accept(self, authorization: bytes) -> bool:
        """Whether an Authorization header has a valid key.

        Accepts `Bearer KEY`, and `Basic` with the key as the password, which browsers can send.
        """
        scheme, _, key = authorization.strip().partition(b" ")
        key = key.strip()
        if scheme.lower() == b"basic":
            try:
                key = base64.b64decode(key, validate=True).partition(b":")[2]
            except binascii.Error:
                key = b""
        elif scheme.lower() != b"bearer":
            key = b""
        given = digest(key)
        return any([hmac.compare_digest(given, valid) for valid in self._digests])


def digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


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
                problem = (
                    f"internal error; the server's log has the details of request {request_id}"
                )
                await ErrorAnswer(ServerFault(problem))(scope, receive, send_with_id)
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


CHALLENGE = {"www-authenticate": 'Basic realm="moecast", charset="UTF-8"'}
SLASHES = re.compile("/{2,}")


def plain_path(scope: Scope) -> str:
    """A request's path without superfluous slashes."""
    return SLASHES.sub("/", scope["path"]).rstrip("/") or "/"


class AccessMiddleware:
    """Rejects requests for another host or without a key, and corrects the paths of the others.

    A path with superfluous slashes is answered as the one without: clients join a base URL that
    ends in a slash with their paths, and a redirect would lose the body. HEAD is answered as GET;
    the server sends no body then.

    Args:
        checks_host: the Host header has to be a name of this machine. Otherwise a web page whose
            name resolves to this machine (DNS rebinding) would share its origin with a server that
            needs no key.
        keys: one of them is required on every path except `OPEN_PATHS`, including paths that do
            not exist; None: no key is.
    """

    def __init__(self, app: ASGIApp, *, checks_host: bool, keys: ApiKeys | None):
        self._app, self._checks_host, self._keys = app, checks_host, keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path = plain_path(scope)
        method = "GET" if scope["method"] == "HEAD" else scope["method"]
        scope = {**scope, "path": path, "raw_path": quote(path).encode(), "method": method}
        try:
            if self._checks_host:
                require_own_host(scope)
            if self._keys is not None and path not in OPEN_PATHS:
                require_key(scope, self._keys)
        except RequestError as error:
            headers = CHALLENGE if isinstance(error, InvalidKey) else {}
            await ErrorAnswer(error, headers)(scope, receive, send)
        else:
            await self._app(scope, receive, send)


def require_own_host(scope: Scope) -> None:
    """Raise RequestError if the Host header is not a name of this machine."""
    host = (read_header(scope, b"host") or b"").decode("latin-1")
    name = re.sub(r":\d+$", "", host).lower()
    if name and not is_loopback(name):
        raise RequestError(
            "a server without a key accepts the host localhost only; set api_key=..., or "
            "insecure=true behind a proxy that authenticates clients",
            status=403,
        )


def require_key(scope: Scope, keys: ApiKeys) -> None:
    """Raise InvalidKey without a valid key, which Anthropic's clients send as X-API-Key."""
    key = read_header(scope, b"x-api-key")
    shown = [read_header(scope, b"authorization"), key and b"Bearer " + key]
    if not any([keys.accept(one) for one in shown if one]):
        problem = "invalid API key" if any(shown) else "missing API key"
        raise InvalidKey(f"{problem}; send the header 'Authorization: Bearer KEY'")
