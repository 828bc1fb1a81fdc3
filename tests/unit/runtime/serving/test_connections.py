"""Hostile and unusual clients on raw connections."""

import logging
import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress

import pytest

from runtime.serving.api import event_stream
from runtime.serving.edge.connections import DEADLINES, ConnectionPhase, RepeatFilter
from tests.builders.serving import RunningServer, running_server, tiny
from tests.builders.waiting import wait_for

KEY = "the-key"
AUTHORIZATION = f"Authorization: Bearer {KEY}\r\n".encode()
GET = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
LIMIT = 24
ESTABLISHED = 1
"""Linux' number of a TCP connection that neither side has closed."""


@pytest.fixture(scope="module")
def guarded(folder):
    """A server with a key, few connections and short deadlines."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("runtime.serving.edge.connections.MAX_CONNECTIONS", LIMIT)
        patch.setattr("runtime.serving.edge.middleware.DISCARD_SECONDS", 0.1)
        patch.setitem(DEADLINES, ConnectionPhase.UNREAD, 0.8)
        patch.setitem(DEADLINES, ConnectionPhase.WAITING, 3.0)
        with running_server(lambda: tiny(folder), keys=frozenset({KEY})) as server:
            yield server


def post(path: str, body: bytes, *, length: int | None = None) -> bytes:
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    size = f"Content-Length: {len(body) if length is None else length}\r\n"
    return (head + size).encode() + AUTHORIZATION + b"\r\n" + body


def exchange(server: RunningServer, request: bytes) -> bytes:
    """Everything that the server answers until it closes the connection."""
    with server.connect(request) as connection:
        return b"".join(iter(lambda: connection.recv(1 << 16), b""))


def wait_end(connection: socket.socket, *, drip: bytes = b"") -> None:
    """Waits until the server ends the connection, although the client may go on sending."""

    def is_ended() -> bool:
        with suppress(OSError):
            connection.sendall(drip)
        return connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] != ESTABLISHED

    wait_for(is_ended, seconds=60)


LEFT_OPEN = {
    "body without a key": b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 99\r\n\r\n{",
    "chunks without a key": b"PUT / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n1",
    "body of a GET": b"GET /health HTTP/1.1\r\nHost: a\r\nContent-Length: 1000\r\n\r\n{",
    "body of a refused method": b"PUT /health HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n\r\n{",
    "body of a refused type": post("/tokenize", b"{", length=9).replace(b"application/json", b"a"),
}


@pytest.mark.parametrize("name", LEFT_OPEN)
def test_answer_before_the_end_of_its_request__closes(guarded: RunningServer, name: str) -> None:
    with guarded.connect(LEFT_OPEN[name]) as connection:
        answer = connection.recv(1 << 16)
        assert answer.startswith(b"HTTP/1.1 ")
        assert b"connection: close" in answer.lower()
        wait_end(connection, drip=b"x")


STARTS = [b"", b"GET /heal", LEFT_OPEN["body without a key"], post("/tokenize", b"{", length=99)]


@pytest.mark.parametrize("start", STARTS)
def test_many_connections__keep_nobody_from_the_server(guarded, start):
    with ExitStack() as stack:
        for _ in range(2 * LIMIT):
            stack.enter_context(guarded.connect(start))
        with guarded.http(headers={"Authorization": f"Bearer {KEY}"}) as client:
            assert client.get("/health").status_code == 200
            assert client.post("/tokenize", json={"prompt": "a"}).status_code == 200


def test_pipelined_answers__that_are_not_read_end_the_connection(guarded: RunningServer) -> None:
    large = b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n" + AUTHORIZATION + b"\r\n"
    with guarded.connect(large * 1000) as connection:
        wait_end(connection)


def test_stream__that_is_not_read_is_cancelled(guarded, monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(event_stream, "format_event", lambda _: f": {'x' * (8 << 20)}\n\n")
    body = b'{"prompt": "a", "max_tokens": 48, "stream": true, "ignore_eos": true}'
    guarded.steps.hold()
    with guarded.connect(post("/v1/completions", body)) as connection:
        wait_end(connection)
    guarded.steps.release()
    wait_for(lambda: "its generation is cancelled" in caplog.text)


NOT_HTTP = [
    b"GET /health\r\n\r\n",
    b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: a\r\nX: " + b"x" * 70_000,
    post("/tokenize", b"").replace(b"Content-Length: 0", b"Transfer-Encoding: chunked") + b"zz\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
]


@pytest.mark.parametrize("request_bytes", NOT_HTTP)
def test_what_is_not_http__is_refused_and_not_logged(guarded, request_bytes, caplog):
    answer = exchange(guarded, request_bytes)
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert b"connection: close" in answer.lower()
    assert {record.name for record in caplog.records} <= {"runtime.serving.edge.middleware"}


def test_length_given_twice__closes_the_connection_after_the_answer(guarded: RunningServer) -> None:
    both = b"Transfer-Encoding: chunked\r\nContent-Length: 6"
    request = post("/tokenize", b"").replace(b"Content-Length: 0", both)
    answer = exchange(guarded, request + b"0\r\n\r\n" + GET)
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert b"connection: close" in answer
    assert answer.count(b"HTTP/1.1 ") == 1, "what follows is taken for a request"


def test_connection_without_a_request__has_a_deadline(guarded: RunningServer) -> None:
    """However many bytes of headers drip."""

    def wait(start: bytes) -> None:
        with guarded.connect(start) as connection:
            wait_end(connection, drip=b"x" if start != GET else b"")

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(wait, (b"", b"GET / HTTP/1.1\r\nHost: a\r\nX: ", GET)))


def test_equal_lines_of_the_log__are_few() -> None:
    limited, kept = RepeatFilter(), []
    for text in ["no descriptor"] * 1000 + ["another"]:
        record = logging.LogRecord("asyncio", logging.ERROR, "f", 1, text, None, None)
        kept += [text] * bool(limited.filter(record))
    assert kept == ["no descriptor", "another"]
