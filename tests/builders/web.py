"""A web server for a folder, on the loopback, that counts requests and fails on demand."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.builders.loopback import QuietHandler, serve_loopback


class Site:
    """What is served, and how."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.address = ""
        self.gets: Counter[str] = Counter()
        self.sent: Counter[str] = Counter()
        """Bytes of bodies, by path."""
        self.cut: dict[str, int] = {}
        """Paths whose next answer ends after this many bytes."""
        self.status: dict[str, int] = {}
        self.redirects: dict[str, str] = {}


class Handler(QuietHandler):
    """GET only."""

    def do_GET(self) -> None:
        site: Site = self.server.site  # type: ignore[attr-defined]
        path = self.path.lstrip("/")
        site.gets[path] += 1
        if path in site.redirects:
            self.send_response(302)
            self.send_header("Location", site.redirects[path])
            self.end_headers()
            return
        file = site.folder / path
        if path in site.status or not file.is_file():
            self.send_error(site.status.get(path, 404))
            return
        data = file.read_bytes()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        body = data[: site.cut.pop(path, len(data))]
        site.sent[path] += len(body)
        self.wfile.write(body)


@contextmanager
def served(folder: Path) -> Iterator[tuple[str, Site]]:
    """Serves the folder; yields the address and the server's controls."""
    site = Site(folder)
    with serve_loopback(Handler, site=site) as site.address:
        yield site.address, site
