"""Hostile and unusual clients on raw connections."""

import asyncio
import errno
import json
import logging
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from runtime.serving.server import limit_accept_errors
from tests.builders.serving import WAIT_SECONDS, RunningServer, running_server, tiny

KEY = "the-key"
AUTHORIZATION = f"Authorization: Bearer {KEY}\r\n".encode()
GET = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
LIMIT = 24
ESTABLISHED = 1
"""Linux' number of a TCP connection that neither side has closed."""


@pytest.fixture(scope="module")
def guarded(folder: Path) -> Iterator[RunningServer]:
    """A server with a key, few connections and short deadlines."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("runtime.serving.connections.MAX_CONNECTIONS", LIMIT)
        patch.setattr("runtime.serving.connections.LINGER_SECONDS", 0.3)
        patch.setattr("runtime.serving.connections.WRITE_SECONDS", 0.7)
        with running_server(lambda: tiny(folder), keys=frozenset({KEY})) as server:
            yield server


@contextmanager
def connect(server: RunningServer) -> Iterator[socket.socket]:
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=WAIT_SECONDS) as connection:
        yield connection


def post(path: str, body: bytes, *, version: str = "1.1", length: int | None = None) -> bytes:
    head = (
        f"POST {path} HTTP/{version}\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body) if length is None else length}\r\n"
    )
    return head.encode() + AUTHORIZATION + b"\r\n" + body


def read_all(connection: socket.socket) -> bytes:
    """Everything until the server closes the connection."""
    content = b""
    while piece := connection.recv(1 << 16):
        content += piece
    return content


def is_ended(connection: socket.socket) -> bool:
    """Whether the server ends the connection although the client goes on sending."""
    deadline = time.monotonic() + WAIT_SECONDS
    connection.settimeout(0.05)
    while time.monotonic() < deadline:
        try:
            connection.sendall(b"x")
            connection.recv(1 << 16)
        except TimeoutError:
            continue
        except OSError:
            return True
    return False


def tcp_state(connection: socket.socket) -> int:
    return connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0]


def error_in(answer: bytes) -> dict[str, str]:
    """The error of an answer in OpenAI's shape."""
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"content-type: application/json" in head.lower()
    assert b"connection: close" in head.lower()
    (error,) = json.loads(body).values()
    assert set(error) == {"message", "type", "param", "code"}
    return error


LEFT_OPEN = {
    "body without a key": b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 99\r\n\r\n{",
    "chunks without a key": b"PUT / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n1",
    "body of a GET": b"GET /health HTTP/1.1\r\nHost: a\r\nContent-Length: 1000\r\n\r\n{",
    "body of a refused type": b"PUT /health HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n"
    + AUTHORIZATION
    + b"\r\n{",
    "no valid request": b"no valid request\r\n\r\n",
}


@pytest.mark.parametrize("name", LEFT_OPEN)
def test_answer_before_the_end_of_its_request__closes(guarded: RunningServer, name: str) -> None:
    with connect(guarded) as connection:
        connection.sendall(LEFT_OPEN[name])
        answer = connection.recv(1 << 16)
        assert answer.startswith(b"HTTP/1.1 ")
        assert b"connection: close" in answer.lower()
        assert is_ended(connection)


@pytest.mark.parametrize(
    "start", [b"", b"GET /heal", *LEFT_OPEN.values(), post("/tokenize", b"{", length=99)]
)
def test_many_connections__keep_nobody_from_the_server(
    guarded: RunningServer, start: bytes
) -> None:
    with ExitStack() as stack:
        for _ in range(2 * LIMIT):
            stack.enter_context(connect(guarded)).sendall(start)
        with guarded.http(headers={"Authorization": f"Bearer {KEY}"}) as client:
            assert client.get("/health").status_code == 200
            assert client.post("/tokenize", json={"prompt": "a"}).status_code == 200


def test_pipelined_answers__that_are_not_read_end_the_connection(guarded: RunningServer) -> None:
    large = b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n" + AUTHORIZATION + b"\r\n"
    with connect(guarded) as connection:
        connection.sendall(large * 1000)
        start = time.monotonic()
        while tcp_state(connection) == ESTABLISHED:
            assert time.monotonic() - start < WAIT_SECONDS
            time.sleep(0.02)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("at_once", [True, False])
def test_half_closed_request__gets_its_answer(
    guarded: RunningServer, stream: bool, at_once: bool
) -> None:
    body = json.dumps({"prompt": "The", "max_tokens": 30, "ignore_eos": True, "stream": stream})
    with connect(guarded) as connection:
        connection.sendall(post("/v1/completions", body.encode()))
        if not at_once:
            time.sleep(0.03)
        connection.shutdown(socket.SHUT_WR)
        answer = read_all(connection)
    answer = answer.removeprefix(b"HTTP/1.1 100 Continue\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 200 ")
    if stream:
        assert b"data: [DONE]" in answer
    else:
        assert json.loads(answer.partition(b"\r\n\r\n")[2])["usage"]["completion_tokens"] == 30


def test_half_closed_request_of_http_1_0__gets_its_answer(guarded: RunningServer) -> None:
    with connect(guarded) as connection:
        connection.sendall(post("/tokenize", b'{"prompt": "a"}', version="1.0"))
        connection.shutdown(socket.SHUT_WR)
        assert read_all(connection).startswith(b"HTTP/1.1 200 ")


def test_half_closed_pipeline__gets_all_answers(guarded: RunningServer) -> None:
    with connect(guarded) as connection:
        connection.sendall(GET * 3)
        connection.shutdown(socket.SHUT_WR)
        assert read_all(connection).count(b"HTTP/1.1 200 ") == 3


@pytest.mark.parametrize("part", [GET[:20], GET[:-2], post("/tokenize", b'{"pro', length=99)])
def test_half_closed_part_of_a_request__is_400(guarded: RunningServer, part: bytes) -> None:
    with connect(guarded) as connection:
        connection.sendall(part)
        connection.shutdown(socket.SHUT_WR)
        answer = read_all(connection)
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert "ended within" in error_in(answer)["message"]


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (b"\r\n\r\n\0\r\n\r\n", 400),
        (b"GET /health\r\n\r\n", 400),
        (b"GET /health HTTP/1.1\r\n\r\n", 400),
        (b"GET /health HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n", 400),
        (b"GET /\xff HTTP/1.1\r\nHost: a\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost : a\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: -1\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: gzip\r\n\r\n", 501),
        (b"GET / HTTP/1.1\r\nHost: a\r\nX: " + b"x" * 70_000, 431),
        (post("/tokenize", b"").replace(b"Content-Length: 0", b"Transfer-Encoding: chunked")
         + b"zz\r\n", 400),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", 400),
    ],
)  # fmt: skip
def test_what_is_not_http__gets_an_error_in_openais_shape(
    guarded: RunningServer, request_bytes: bytes, status: int
) -> None:
    with connect(guarded) as connection:
        connection.sendall(request_bytes)
        answer = read_all(connection)
    assert answer.startswith(f"HTTP/1.1 {status} ".encode())
    assert error_in(answer)["type"] == "invalid_request_error"


def test_length_given_twice__closes_the_connection_after_the_answer(guarded: RunningServer) -> None:
    both = b"Transfer-Encoding: chunked\r\nContent-Length: 6"
    request = post("/tokenize", b"").replace(b"Content-Length: 0", both)
    with connect(guarded) as connection:
        connection.sendall(request + b"0\r\n\r\n" + GET)
        answer = read_all(connection)
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert b"connection: close" in answer
    assert answer.count(b"HTTP/1.1 ") == 1, "what follows is taken for a request"


def test_full_server__answers_503_in_openais_shape(
    guarded: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("runtime.serving.connections.ConnectionTable.admit", lambda *_: False)
    with connect(guarded) as connection:
        connection.sendall(GET)
        answer = read_all(connection)
    assert answer.startswith(b"HTTP/1.1 503 ")
    assert b"retry-after: 1" in answer
    assert error_in(answer)["code"] == "overloaded"


def test_accept_errors__are_counted_and_other_errors_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def report() -> None:
        loop = asyncio.get_running_loop()
        handle = limit_accept_errors(loop)
        full = OSError(errno.EMFILE, "Too many open files")
        for _ in range(1000):
            handle(loop, {"message": "out of resource", "exception": full, "socket": None})
        handle(loop, {"message": "another error", "exception": ValueError("x")})

    with caplog.at_level(logging.WARNING):
        asyncio.run(report())
    messages = [record.getMessage().splitlines()[0] for record in caplog.records]
    assert messages == ["no connection could be accepted", "another error"]


def test_warnings_about_requests__are_counted_in_one_line(
    guarded: RunningServer, caplog: pytest.LogCaptureFixture
) -> None:
    upgrade = GET.replace(b"\r\n\r\n", b"\r\nConnection: upgrade\r\nUpgrade: h2c\r\n\r\n")
    with caplog.at_level(logging.WARNING):
        for content, status in [(b"no http\r\n\r\n", b"400"), (upgrade, b"200")] * 5:
            with connect(guarded) as connection:
                connection.sendall(content)
                assert connection.recv(1 << 16).startswith(b"HTTP/1.1 " + status)
    assert len(caplog.records) <= 1
