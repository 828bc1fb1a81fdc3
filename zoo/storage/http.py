"""Storage on a web server: nginx, a bucket's public address, `python -m http.server`."""

import posixpath
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from http import HTTPStatus
from threading import Thread
from typing import TYPE_CHECKING
from urllib.parse import quote, unquote, urlsplit

from zoo.digest import check_path
from zoo.errors import UnreachableError
from zoo.storage.base import ByteStream, Storage, refuse_when_offline

if TYPE_CHECKING:
    import httpx2

TIMEOUT_SECONDS = 30.0
"""Longest wait for the next bytes: a slow download continues, a dead one fails."""
READ_SECONDS = 120.0
"""Longest time for an index, manifest or signature as a whole; they are read into memory."""
DEFAULT_PORTS = {"http": 80, "https": 443}
ATTEMPTS = 3
"""Attempts to connect. The next pull resumes an interrupted download."""


@dataclass(frozen=True)
class HttpStorage(Storage):
    """Static files below an address; a download resumes if the server supports `Range`."""

    url: str
    """With or without a trailing slash; no query. It may have a user name and a password."""
    headers: Mapping[str, str] = field(default_factory=dict, repr=False, compare=False)

    @property
    def address(self) -> str:
        """The address without user name and password: it is printed, and written to files."""
        scheme, _, rest = self.url.rstrip("/").partition("://")
        place, slash, path = rest.partition("/")
        return f"{scheme}://{place.rpartition('@')[2]}{slash}{path}"

    @property
    def canonical_address(self) -> str:
        parts = urlsplit(self.address)
        scheme, host = parts.scheme.lower(), (parts.hostname or "").rstrip(".")
        port = parts.port
        if port not in (None, DEFAULT_PORTS.get(scheme)):
            host = f"{host}:{port}"
        path = posixpath.normpath("/" + unquote(parts.path).strip("/"))
        return f"{scheme}://{host}{quote(path).rstrip('/')}"

    @cached_property
    def _client(self) -> "httpx2.Client":
        import httpx2

        return httpx2.Client(
            headers=dict(self.headers),
            timeout=TIMEOUT_SECONDS,
            follow_redirects=True,
            max_redirects=5,
            transport=httpx2.HTTPTransport(retries=ATTEMPTS),
        )

    def read(self, path: str, *, limit: int | None = None) -> bytes:
        """Reads a file within READ_SECONDS, however slowly headers and body drip."""
        done: Future[bytes] = Future()

        def read_all() -> None:
            try:
                done.set_result(super(HttpStorage, self).read(path, limit=limit))
            except BaseException as error:
                done.set_exception(error)

        # A daemon: one that is given up must not hold up the exit.
        Thread(target=read_all, name="zoo-read", daemon=True).start()
        try:
            return done.result(READ_SECONDS)
        except TimeoutError as error:
            raise UnreachableError(
                f"{self.address}/{path} did not arrive within {READ_SECONDS:g} s; try again later"
            ) from error

    @contextmanager
    def stream(self, path: str, *, offset: int = 0) -> Iterator[ByteStream]:
        import httpx2

        url = f"{self.address}/{check_path(path)}"
        refuse_when_offline(url)
        # The digest is of the stored bytes, so the server must not compress them.
        headers = {"Accept-Encoding": "identity"}
        if offset:
            headers["Range"] = f"bytes={offset}-"
        try:
            target = f"{self.url.rstrip('/')}/{path}"
            with self._client.stream("GET", target, headers=headers) as response:
                self._check(response, url)
                resumed = response.status_code == HTTPStatus.PARTIAL_CONTENT
                # As they arrive: in larger chunks, the bytes before an error would be lost.
                yield ByteStream(offset if resumed else 0, response.iter_raw())
        except (httpx2.HTTPError, httpx2.InvalidURL) as error:
            reason = str(error) or type(error).__name__
            raise UnreachableError(
                f"{url} cannot be read: {reason}; check the address and the network and try again: "
                "the bytes received so far are kept"
            ) from error

    def _check(self, response: "httpx2.Response", url: str) -> None:
        status = response.status_code
        if status in (HTTPStatus.NOT_FOUND, HTTPStatus.GONE):
            raise FileNotFoundError(url)
        if url.startswith("https:") and response.url.scheme != "https":
            raise UnreachableError(f"{url} redirects to {response.url}, which is not encrypted")
        if status not in (HTTPStatus.OK, HTTPStatus.PARTIAL_CONTENT):
            refused = status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN)
            hint = "; log in, or check that you may read it" if refused else ""
            raise UnreachableError(f"{url}: the server answers {status}{hint}")
