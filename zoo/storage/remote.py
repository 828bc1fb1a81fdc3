"""Storage that fsspec reaches: a web server, which is only read, and object stores.

Object stores are s3://, gs://, az:// and memory://.
"""

import logging
import tempfile
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import IO, TYPE_CHECKING, Any

from zoo.digest import check_path
from zoo.errors import ConflictError, StorageError, UnreachableError, ZooError
from zoo.index import INDEX
from zoo.storage.base import CHUNK_BYTES, FileStorage, Storage, join_chunks, refuse_when_offline

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

log = logging.getLogger(__name__)

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


EXTRAS = {"s3": "s3", "gs": "gcs", "gcs": "gcs", "az": "azure", "abfs": "azure"}
"""The extra of moecast that installs the library for a scheme."""

UNKNOWN_CREDENTIALS = (
    "the store does not know these credentials: check them; if they are temporary, they have "
    "expired: log in again, or renew AWS_SESSION_TOKEN"
)
"""Some stores have no other answer to a session that has ended: SeaweedFS."""
THROTTLED = "the store takes no more requests: try again later, or with fewer workers"
HINTS = {
    "ExpiredToken": "your credentials have expired: log in again, or renew AWS_SESSION_TOKEN",
    "InvalidAccessKeyId": UNKNOWN_CREDENTIALS,
    "InvalidToken": UNKNOWN_CREDENTIALS,
    "RequestTimeTooSkewed": "the clock of this machine is off: set it (timedatectl set-ntp true)",
    "SlowDown": THROTTLED,
    "503": THROTTLED,
}
"""Advice by the code of an S3 error."""

CONFLICTS = ("PreconditionFailed", "ConditionalRequestConflict", "NoSuchKey")
"""Codes with which S3 refuses a conditional write; the last if there is nothing to match."""


def error_code(error: Exception) -> str:
    """Returns the code of an S3 error, `404` of one without a body; empty for other errors."""
    cause: BaseException | None = error
    while cause is not None:
        response = getattr(cause, "response", None)
        if isinstance(response, dict):
            return str(response.get("Error", {}).get("Code", ""))
        cause = cause.__cause__
    return ""


@dataclass(frozen=True)
class ObjectStorage(RemoteStorage, FileStorage):
    """Objects below a prefix. An object appears when its upload is complete.

    There are no locks. S3 replaces an index only if it is still the one that was read (If-Match);
    elsewhere the later of two indexes wins, and a warning says so.
    """

    url: str

    @property
    def is_remote(self) -> bool:
        return not self.url.startswith("memory:")

    @cached_property
    def _files(self) -> "tuple[AbstractFileSystem, str]":
        import fsspec

        if self.is_remote:
            refuse_when_offline(self.address)
        try:
            # Other machines write here, so an earlier listing may be out of date.
            return fsspec.url_to_fs(self.address, use_listings_cache=False)
        except Exception as error:  # of any library that fsspec loads
            extra = EXTRAS.get(self.url.partition(":")[0])
            hint = f"pip install 'moecast[{extra}]'" if extra else "use https://, s3:// or hf://"
            raise StorageError(f"{self.address} cannot be opened: {error}; {hint}") from error

    def _explain(self, error: Exception) -> str:
        if error_code(error).isdigit():
            # The answer to a HEAD request has no body, so S3 cannot say why it refuses one: that
            # to a listing can.
            files, root = self._files
            try:
                files.ls(root)
            except FileNotFoundError:
                pass
            except Exception as reason:  # of any library; its cause is that of the given error
                error = reason
        hint = HINTS.get(error_code(error), "check the address, the network and your credentials")
        return f"{error}; {hint}"

    def read(self, path: str, *, limit: int | None = None) -> bytes:
        # One request: between two, another machine may replace the object.
        with self._access(path) as (files, name):
            return files.cat_file(name, start=0, end=None if limit is None else limit + 1)

    def names(self, folder: str = "") -> list[str]:
        with suppress(FileNotFoundError), self._access(folder) as (files, name):
            return sorted(path.rpartition("/")[2] for path in files.ls(name, detail=False))
        return []

    def size(self, path: str) -> int | None:
        info = self._info(path)
        return info["size"] if info.get("type") == "file" else None

    def _info(self, path: str) -> dict[str, Any]:
        """Returns what the store says of a file or a folder; empty if there is none."""
        with suppress(FileNotFoundError), self._access(path) as (files, name):
            return files.info(name)
        return {}

    @contextmanager
    def _writing(self, path: str) -> Iterator[tuple["AbstractFileSystem", str]]:
        with self._access(path) as (files, name):
            files.makedirs(files._parent(name), exist_ok=True)
            yield files, name

    @contextmanager
    def open_new(self, path: str) -> Iterator[IO[bytes]]:
        # A local file first: an upload that is cut off must not look like a complete one.
        with tempfile.NamedTemporaryFile(prefix="moecast-") as file:
            yield file
            file.flush()
            with self._writing(path) as (files, name):
                files.put_file(file.name, name)

    def write(self, path: str, data: bytes) -> None:
        with self._writing(path) as (files, name):
            files.pipe_file(name, data)

    def create(self, path: str, data: bytes) -> bool:
        with suppress(FileExistsError), self._writing(path) as (files, name):
            files.pipe_file(name, data, mode="create")
            return True
        return False

    def remove(self, path: str) -> None:
        with self._access(path) as (files, name):
            if files.exists(name):
                files.rm_file(name)

    def exclusive(self) -> AbstractContextManager[str | None]:
        """Yields the index's ETag, None if there is no index: `publish` replaces no other."""
        return nullcontext(self._info(INDEX).get("ETag"))

    def write_index(self, path: str, data: bytes, seen: str | None) -> None:
        if not self._has_conditional_writes:
            self.write(path, data)
            return
        if self._write_if(path, data, {"IfNoneMatch": "*"} if seen is None else {"IfMatch": seen}):
            return
        # A write whose answer was lost is repeated by the library, and then meets itself.
        if not self.has(path) or self.read(path) != data:
            raise ConflictError(
                f"{self.address}/{path} is being changed by other publishers all the time; try "
                "again"
            )

    @cached_property
    def _has_conditional_writes(self) -> bool:
        """Whether the store minds If-Match; if not, a warning says so.

        Some stores ignore it without a word. So an object that nobody has is replaced by way of
        trial, which must fail.
        """
        probe = f"{INDEX}.probe"
        supported = False
        if self.url.startswith(("s3:", "s3a:")):
            supported = not self._write_if(probe, b"", {"IfMatch": f'"{"0" * 32}"'})
            if not supported:
                self.remove(probe)
        if not supported and self.is_remote:
            log.warning(
                "%s has no conditional writes (If-Match): of two that publish at once, one's "
                "listing may be lost; let one publish at a time",
                self.address,
            )
        return supported

    def _write_if(self, path: str, data: bytes, condition: Mapping[str, str]) -> bool:
        """Writes a file in one conditional request; returns False if the store refuses it."""
        with self._writing(path) as (files, name):
            try:
                files.pipe_file(name, data, **condition)
            except Exception as error:  # of any library
                if error_code(error) not in CONFLICTS:
                    raise
                return False
        return True
