"""An HTTP server on the loopback, for tests."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

POLL_SECONDS = 0.02


class QuietHandler(BaseHTTPRequestHandler):
    """Keeps requests out of the tests' output."""

    def log_message(self, *_: object) -> None: ...


@contextmanager
def serve_loopback(handler: type[BaseHTTPRequestHandler], **attributes: Any) -> Iterator[str]:
    """Serves on a free port; yields the address.

    Args:
        handler: Makes the handler of each request.
        attributes: Set on the server, which the handler has as `server`.
    """
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    vars(server).update(attributes)
    thread = threading.Thread(target=server.serve_forever, args=(POLL_SECONDS,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
