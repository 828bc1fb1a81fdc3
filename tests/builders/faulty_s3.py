"""A proxy in front of an object store that fails, on request, as S3 does."""

import http.client
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from tests.builders.loopback import QuietHandler, serve_loopback

HOP_BY_HOP = {"connection", "expect", "transfer-encoding"}


@dataclass
class StoreFault:
    """An answer in place of the store's to requests that match, the first `times` of them."""

    matches: Callable[[str, str], bool]
    """Is called with the method and the path with its query."""
    status: int = 503
    code: str | None = "SlowDown"
    """None: the connection is closed in the middle of the request's body."""
    message: str = "Please reduce your request rate."
    times: int = 1_000_000
    met: int = 0
    """How many requests have met the fault."""


@dataclass
class FaultyStore:
    """Address, faults and requests of a running proxy."""

    address: str
    faults: list[StoreFault] = field(default_factory=list)
    before: Callable[[str, str], object] = lambda _method, _path: None
    """Is called with each request's method and path before it is served; may wait."""
    answers: list[tuple[str, str, int]] = field(default_factory=list)
    """Method, path and status of each request that the store has answered."""
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def find_fault(self, method: str, path: str) -> StoreFault | None:
        with self._lock:
            for fault in self.faults:
                if fault.met < fault.times and fault.matches(method, path):
                    fault.met += 1
                    return fault
        return None


@contextmanager
def faulty_store(upstream: str) -> Iterator[FaultyStore]:
    """Runs a proxy to the store at an address."""

    class Handler(QuietHandler):
        protocol_version = "HTTP/1.1"

        def _handle(self) -> None:
            length = int(self.headers.get("Content-Length", 0))
            fault = store.find_fault(self.command, self.path)
            self.close_connection = True
            if fault is not None and fault.code is None:
                self.rfile.read(length // 2)
                return
            body = self.rfile.read(length)
            store.before(self.command, self.path)
            if fault is not None:
                self._refuse(fault)
            else:
                self._forward(body)

        do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _handle

        def _forward(self, body: bytes) -> None:
            """Answers as the store does."""
            connection = http.client.HTTPConnection(urlsplit(upstream).netloc, timeout=60)
            try:
                skipped = {"skip_host": True, "skip_accept_encoding": True}
                connection.putrequest(self.command, self.path, **skipped)
                for key, value in self.headers.items():
                    if key.lower() not in HOP_BY_HOP:
                        connection.putheader(key, value)
                connection.endheaders(body)
                answer = connection.getresponse()
                store.answers.append((self.command, urlsplit(self.path).path, answer.status))
                self._answer(answer.status, answer.getheaders(), answer.read())
            finally:
                connection.close()

        def _refuse(self, fault: StoreFault) -> None:
            text = f"<Error><Code>{fault.code}</Code><Message>{fault.message}</Message></Error>"
            data = b"" if self.command == "HEAD" else text.encode()
            headers = [("Content-Type", "application/xml"), ("Content-Length", str(len(data)))]
            self._answer(fault.status, headers, data)

        def _answer(self, status: int, headers: list[tuple[str, str]], data: bytes) -> None:
            self.send_response_only(status)
            for key, value in headers:
                if key.lower() not in HOP_BY_HOP:
                    self.send_header(key, value)
            self.send_header("Connection", "close")
            self.end_headers()
            self.wfile.write(data)

    with serve_loopback(Handler) as address:
        store = FaultyStore(address)
        yield store
