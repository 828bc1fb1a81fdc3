"""Storage on a web server: nginx, a bucket's public address, `python -m http.server`."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from http import HTTPStatus
from typing import TYPE_CHECKING

from zoo.digest import check_path
from zoo.errors import UnreachableError
from zoo.storage.base import ByteStream, Storage, refuse_when_offline

if TYPE_CHECKING:
    import httpx2

TIMEOUT_SECONDS = 30.0
"""Longest wait for the next bytes: a slow download continues, a dead one fails."""
ATTEMPTS = 3
"""Attempts to connect. The next pull resumes an interrupted download."""


@dataclass(frozen=True)
class HttpStorage(Storage):
    """Static files below an address; a download resumes if the server supports `Range`."""

    url: str
    """With or without a trailing slash; no query."""
    headers: Mapping[str, str] = field(default_factory=dict, repr=False, compare=False)

    @property
    def address(self) -> str:
        return self.url.rstrip("/")

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
            with self._client.stream("GET", url, headers=headers) as response:
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
