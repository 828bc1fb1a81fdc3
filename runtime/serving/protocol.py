"""HTTP connections on top of uvicorn's: deadlines, half-closed clients, errors in one shape."""

import asyncio
import errno
import json
import logging
import socket
import struct
import sys
from typing import Any

import h11
from starlette.types import Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import STATUS_PHRASES, H11Protocol

from runtime.serving.connections import ConnectionPhase, ConnectionTable, client_group
from runtime.serving.errors import error_body

CLOSE = (b"connection", b"close")
MAX_MESSAGE = 200
"""Characters of a message that may quote the client's input."""
TOO_MANY = "too many connections; try again later"
FIRST_PROBE_SECONDS, PROBE_SECONDS = 0.002, 0.1
"""Shortest and longest time between two looks at a client that sent its last byte."""
PROBES_PER_WRITE = 150
"""A client that goes later is found by another write, every 15 s."""
STREAM_PING = b": ping\n\n"
EVENT_STREAM = b"text/event-stream"
HIDDEN_ERRORS = frozenset({errno.ECONNRESET, errno.EPIPE, errno.ETIMEDOUT})


def is_about_the_server(record: logging.LogRecord) -> bool:
    """Filter of uvicorn's log: its warnings are about single requests, as many as clients send.

    `ConnectionTable` counts those that are not HTTP; of the others each has its line in the log.
    """
    return record.levelno != logging.WARNING


class LingeringTransport(asyncio.Transport):
    """A transport that counts bytes, and whose `close` lets the client read the last answer.

    A socket that is closed with unread data resets the connection, and the client may lose an
    answer that it has not read. Therefore the sending half is closed first, and what still arrives
    is discarded until the client closes too, or until `ConnectionTable` ends it.
    """

    def __init__(self, inner: asyncio.Transport):
        super().__init__()
        self._inner = inner
        self.num_written = 0
        self.is_lingering = False
        self.has_unread_data = False
        """The request has not been read to its end."""

    def close(self) -> None:
        if self.is_lingering or self._inner.is_closing():
            return
        if not self.has_unread_data:
            self._inner.close()
            return
        self.is_lingering = True
        self._inner.write_eof()
        self._inner.resume_reading()

    def abort(self) -> None:
        """Close at once; what the client has not read is discarded in the kernel too."""
        if self._inner.get_write_buffer_size():
            connection: socket.socket = self._inner.get_extra_info("socket")
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._inner.abort()

    def is_closing(self) -> bool:
        return self.is_lingering or self._inner.is_closing()

    def write(self, data: Any) -> None:
        if not self.is_closing():
            self.num_written += len(data)
            self._inner.write(data)

    def get_write_buffer_size(self) -> int:
        return self._inner.get_write_buffer_size()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._inner.get_extra_info(name, default)

    def pause_reading(self) -> None:
        if not self.is_lingering:
            self._inner.pause_reading()

    def resume_reading(self) -> None:
        self._inner.resume_reading()


class ServerProtocol(H11Protocol):
    """One connection. `table` ends it at its deadlines, or for others.

    * An answer that precedes the end of its request closes the connection.
    * A client that closes its sending half gets its answer.
    * Requests that are not HTTP get an error in OpenAI's shape.
    """

    transport: LingeringTransport

    def __init__(self, *args: Any, table: ConnectionTable, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.table = table
        self.address = ""
        self.phase = ConnectionPhase.HEADERS
        self.since = self.loop.time()
        self._inner_app, self.app = self.app, self._run_app
        self._is_half_closed = False
        self._is_event_stream = False
        self._probe: asyncio.TimerHandle | None = None

    # ---- what the table sees

    def unsent_bytes(self) -> int:
        return self.transport.get_write_buffer_size()

    def sent_bytes(self) -> int:
        return self.transport.num_written - self.unsent_bytes()

    def abort(self) -> None:
        self.transport.abort()

    def close(self) -> None:
        self.transport.close()
        self._update_phase()

    def _update_phase(self) -> None:
        phase = self._current_phase()
        if phase is not self.phase:
            self.phase, self.since = phase, self.loop.time()

    def _current_phase(self) -> ConnectionPhase:
        if self.transport.is_closing():
            return ConnectionPhase.CLOSING
        if self.cycle is None:
            return ConnectionPhase.HEADERS
        if self.cycle.response_complete:
            has_data = bool(self.conn.trailing_data[0])
            return ConnectionPhase.HEADERS if has_data else ConnectionPhase.IDLE
        if self.flow.write_paused:
            return ConnectionPhase.UNREAD
        if self.conn.their_state is h11.SEND_BODY:
            return ConnectionPhase.BODY
        return ConnectionPhase.RUNNING

    # ---- events of the connection

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(LingeringTransport(transport))
        self.address = client_group(self.client[0] if self.client else None)
        if self.table.admit(self, self.loop.time()):
            return
        if self.table.may_answer_refusal():
            self._send_error(503, TOO_MANY, kind="service_unavailable_error", code="overloaded")
            self._update_phase()
        else:
            self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self.table.remove(self)
        if self._probe is not None:
            self._probe.cancel()
        self._unset_keepalive_if_required()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        super().data_received(data)
        self._update_phase()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._is_half_closed and self.cycle.response_complete:
            self.transport.close()
        self._update_phase()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._update_phase()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._update_phase()

    def shutdown(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.keep_alive = False
        else:
            self.transport.close()
        self._update_phase()

    # ---- requests

    async def _run_app(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the application; its answer closes the connection if the body is incomplete.

        The same if the request gives its body's length twice, in different ways: another server on
        the way may have read it differently, and take what follows for a request (RFC 9112, 6.1).
        """
        names = {name for name, _ in scope.get("headers", ())}
        is_ambiguous = {b"content-length", b"transfer-encoding"} <= names

        async def send_or_close(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = list(message.get("headers", ()))
                kinds = [value for name, value in headers if name == b"content-type"]
                self._is_event_stream = any(kind.startswith(EVENT_STREAM) for kind in kinds)
                is_incomplete = self.conn.their_state is h11.SEND_BODY
                if is_incomplete or self._is_half_closed:
                    self.transport.has_unread_data = not self._is_half_closed
                must_close = is_incomplete or self._is_half_closed or is_ambiguous
                if must_close and CLOSE not in headers:
                    message["headers"] = [*headers, CLOSE]
            await send(message)

        await self._inner_app(scope, receive, send_or_close)

    def send_400_response(self, msg: str) -> None:
        """Answer what is not HTTP; uvicorn calls this while it handles the parser's error."""
        error = sys.exc_info()[1]
        status = 400
        if isinstance(error, h11.RemoteProtocolError):
            status, msg = error.error_status_hint, f"invalid HTTP request: {error}"[:MAX_MESSAGE]
        self.table.add_invalid(self)
        self._send_error(status, msg)

    def _send_error(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        code: str | None = None,
    ) -> None:
        """Answer without the application, and close; a begun answer is cut off."""
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.abort()
            return
        body = json.dumps(error_body(message, kind=kind, code=code)).encode()
        headers = [
            *self.server_state.default_headers,
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            CLOSE,
        ]
        if status == 503:
            headers.append((b"retry-after", b"1"))
        reason = STATUS_PHRASES[status]
        response = h11.Response(status_code=status, headers=headers, reason=reason)
        for event in (response, h11.Data(data=body), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event))
        self.transport.has_unread_data = not self._is_half_closed
        self.transport.close()

    # ---- clients that close their sending half

    def eof_received(self) -> bool:  # type: ignore[override]
        """Keep the connection open while a complete request waits for its answer."""
        if self.transport.is_closing() or self._is_half_closed:
            return self._is_half_closed and not self.transport.is_closing()
        self._is_half_closed = True
        is_answering = self.cycle is not None and not self.cycle.response_complete
        if is_answering and self.conn.their_state is not h11.SEND_BODY:
            self._look_for_client(0)
            return not self.transport.is_closing()
        if is_answering or self.conn.trailing_data[0]:
            self._send_error(400, "invalid HTTP request: the connection ended within the request")
        return False

    def _look_for_client(self, number: int) -> None:
        """Find out whether a client without a sending half still receives.

        Both cases look the same until something is written to the client: one that is gone resets
        the connection. HTTP/1.1 allows an interim response at any time before the final one, and an
        event stream a comment.
        """
        if self.transport.is_closing() or self.cycle.response_complete:
            return
        if number % PROBES_PER_WRITE == 0:
            self._write_probe()
        connection: socket.socket = self.transport.get_extra_info("socket")
        if connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) in HIDDEN_ERRORS:
            self.transport.abort()
            return
        delay = min(FIRST_PROBE_SECONDS * 2 ** min(number, 10), PROBE_SECONDS)
        self._probe = self.loop.call_later(delay, self._look_for_client, number + 1)

    def _write_probe(self) -> None:
        """Write something without a meaning, if the answer has a place for it.

        HTTP/1.0 has none: there a client that has gone is noticed when its answer is written.
        """
        if self.conn.our_state is h11.SEND_RESPONSE and self.conn.their_http_version != b"1.0":
            event = h11.InformationalResponse(status_code=100, headers=[], reason=b"Continue")
            self.transport.write(self.conn.send(event))
        elif self.conn.our_state is h11.SEND_BODY and self._is_event_stream:
            self.transport.write(self.conn.send(h11.Data(data=STREAM_PING)))
