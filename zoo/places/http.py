"""Any web server that hands out a zoo's files: nginx, a bucket's public address, http.server."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from http import HTTPStatus
from typing import TYPE_CHECKING

from zoo.digest import check_path
from zoo.errors import UnreachableError
from zoo.places.base import Place, Stream
from zoo.places.offline import refuse_when_offline

if TYPE_CHECKING:
    import httpx2

TIMEOUT_SECONDS = 30.0
"""Without a byte: a slow download goes on, a dead one ends."""
ATTEMPTS = 3
"""To connect; a download cut short is resumed by the next pull."""


@dataclass(frozen=True)
class HttpPlace(Place):
    """Static files below an address. Whole in `Range` requests where the server knows them."""

    url: str
    """With or without a slash at its end; no query."""
    headers: Mapping[str, str] = field(default_factory=dict, repr=False, compare=False)

    @property
    def where(self) -> str:
        return self.url.rstrip("/")

    def address(self, path: str) -> str:
        """Of one file."""
        return f"{self.where}/{check_path(path)}"

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
    def stream(self, path: str, *, offset: int = 0) -> Iterator[Stream]:
        import httpx2

        address = self.address(path)
        refuse_when_offline(address)
        # Bytes as they are stored: a digest is of them, not of what a server makes of them.
        headers = {"Accept-Encoding": "identity"}
        if offset:
            headers["Range"] = f"bytes={offset}-"
        try:
            with self._client.stream("GET", address, headers=headers) as response:
                self._check(response, address)
                resumed = response.status_code == HTTPStatus.PARTIAL_CONTENT
                # As they arrive: gathered into larger chunks, those before an error would be lost.
                yield Stream(offset if resumed else 0, response.iter_raw())
        except (httpx2.HTTPError, httpx2.InvalidURL) as error:
            reason = str(error) or type(error).__name__
            raise UnreachableError(
                f"{address} cannot be read: {reason}; check the address and the network, and ask "
                "again: what has arrived is kept"
            ) from error

    def _check(self, response: "httpx2.Response", address: str) -> None:
        status = response.status_code
        if status in (HTTPStatus.NOT_FOUND, HTTPStatus.GONE):
            raise FileNotFoundError(address)
        if address.startswith("https:") and response.url.scheme != "https":
            raise UnreachableError(f"{address} leads to {response.url}, which is not encrypted")
        if status not in (HTTPStatus.OK, HTTPStatus.PARTIAL_CONTENT):
            refused = status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN)
            hint = "; log in, or check that you may read it" if refused else ""
            raise UnreachableError(f"{address}: the server answers {status}{hint}")
