"""Storage that fsspec reaches over the network; that of a web server, which is only read."""

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from zoo.digest import check_path
from zoo.errors import UnreachableError, ZooError
from zoo.storage.base import CHUNK_BYTES, Storage, join_chunks, refuse_when_offline

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

LIBRARIES = ("botocore", "aiobotocore", "s3fs", "gcsfs", "google", "adlfs", "azure", "aiohttp")
"""Packages that fsspec reaches other machines with."""

STALL_SECONDS = 30.0
"""Longest wait for the next bytes of a web server: a slow download continues, a dead one fails."""
READ_SECONDS = 120.0
"""Longest time for an index, manifest or signature as a whole; they are read into memory."""


class RemoteStorage(Storage):
    """Files below an address of one of fsspec's file systems."""

    url: str

    @property
    def address(self) -> str:
        return self.url.rstrip("/")

    @property
    @abstractmethod
    def _files(self) -> "tuple[AbstractFileSystem, str]":
        """The file system and the prefix in it."""

    @abstractmethod
    def _explain(self, error: Exception) -> str:
        """Returns why a request failed, and what to do about it."""

    def _open(self, files: "AbstractFileSystem", name: str) -> Any:
        return files.open(name, "rb")

    @contextmanager
    def _access(self, path: str) -> Iterator[tuple["AbstractFileSystem", str]]:
        """Yields the file system and the file's name in it; translates its errors."""
        files, root = self._files
        name = f"{root}/{check_path(path)}" if path else root
        try:
            yield files, name
        except FileNotFoundError as error:
            raise FileNotFoundError(f"{self.address}/{path}") from error
        except (FileExistsError, ZooError):
            raise
        except Exception as error:
            # Libraries raise their own classes: botocore's NoCredentialsError is no OSError.
            library = type(error).__module__.partition(".")[0]
            if not isinstance(error, OSError | ValueError) and library not in LIBRARIES:
                raise
            raise UnreachableError(
                f"{self.address}/{path} cannot be reached: {self._explain(error)}"
            ) from error

    @contextmanager
    def stream(self, path: str) -> Iterator[Iterator[bytes]]:
        with self._access(path) as (files, name):
            file = self._open(files, name)
        with file:
            yield self._chunks(file, path)

    def _chunks(self, file: Any, path: str) -> Iterator[bytes]:
        # Only the reading is guarded here: an error of the caller, such as a full disk, is not the
        # storage's.
        while True:
            with self._access(path):
                chunk = file.read(CHUNK_BYTES)
            if not chunk:
                return
            yield chunk


@dataclass(frozen=True)
class HttpStorage(RemoteStorage):
    """Static files below an address: nginx, a bucket's public one, `python -m http.server`."""

    url: str
    """With or without a trailing slash; no query. It may have a user name and a password."""
    headers: Mapping[str, str] = field(default_factory=dict, repr=False, compare=False)

    @property
    def address(self) -> str:
        """The address without user name and password: it is printed, and written to files."""
        scheme, _, rest = self.url.rstrip("/").partition("://")
        place, slash, path = rest.partition("/")
        return f"{scheme}://{place.rpartition('@')[2]}{slash}{path}"

    @cached_property
    def _files(self) -> "tuple[AbstractFileSystem, str]":
        import fsspec

        refuse_when_offline(self.address)
        # The digest is of the stored bytes, so the server must not compress them.
        client = {"headers": {"Accept-Encoding": "identity", **self.headers}, "trust_env": True}
        files = fsspec.filesystem("http", client_kwargs=client, skip_instance_cache=True)
        return files, self.url.rstrip("/")

    def _open(self, files: "AbstractFileSystem", name: str, *, seconds: float | None = None) -> Any:
        from aiohttp import ClientTimeout

        timeout = ClientTimeout(total=seconds, sock_connect=STALL_SECONDS, sock_read=STALL_SECONDS)
        # With a size and without blocks, the answer to one request is read as it arrives.
        file = files.open(name, "rb", block_size=0, size=1, max_redirects=5, timeout=timeout)
        if self.url.startswith("https:") and file.r.url.scheme != "https":
            file.close()
            raise UnreachableError(
                f"{self.address} redirects to {file.r.url}, which is not encrypted"
            )
        return file

    def read(self, path: str, *, limit: int | None = None) -> bytes:
        """Reads a file within READ_SECONDS, however slowly headers and body drip."""
        with self._access(path) as (files, name):
            file = self._open(files, name, seconds=READ_SECONDS)
        with file:
            return join_chunks(self._chunks(file, path), limit=limit)

    def _explain(self, error: Exception) -> str:
        status = getattr(error, "status", None)
        if status in (401, 403):
            return f"the server answers {status}; log in, or check that you may read it"
        if status:
            return f"the server answers {status}; try again later"
        if isinstance(error, TimeoutError):
            return "it did not arrive in time; try again later"
        # An invalid address is its own message, with the password.
        reason = "no valid address" if isinstance(error, ValueError) else str(error)
        return f"{reason}; check the address and the network and try again"
