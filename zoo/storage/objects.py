"""Storage in an object store that fsspec reaches: s3://, gs://, az://, memory://."""

import logging
import tempfile
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import IO, TYPE_CHECKING

from zoo.digest import check_path
from zoo.errors import ConflictError, StorageError, UnreachableError
from zoo.index import INDEX
from zoo.storage.base import CHUNK_BYTES, ByteStream, FileStorage, refuse_when_offline

if TYPE_CHECKING:
    import fsspec

log = logging.getLogger(__name__)

EXTRAS = {"s3": "s3", "gs": "gcs", "gcs": "gcs", "az": "azure", "abfs": "azure"}
"""The extra of moecast that installs the library for a scheme."""

LIBRARIES = ("botocore", "aiobotocore", "s3fs", "gcsfs", "google", "adlfs", "azure", "aiohttp")
"""Packages that fsspec reaches object stores with."""

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

READS = 5
"""A small object that is replaced while it is read is read again at most this often."""


def is_of_library(error: Exception) -> bool:
    """Returns whether the error's class belongs to a library of an object store."""
    return type(error).__module__.partition(".")[0] in LIBRARIES


def error_code(error: Exception) -> str:
    """Returns the code of an S3 error, `404` of one without a body; empty for other errors."""
    cause: BaseException | None = error
    while cause is not None:
        response = getattr(cause, "response", None)
        if isinstance(response, dict):
            return str(response.get("Error", {}).get("Code", ""))
        cause = cause.__cause__
    return ""


def is_replaced(error: Exception) -> bool:
    """Returns whether an object was replaced between the requests that read it."""
    return error_code(error) == "PreconditionFailed" or type(error).__name__ == "FileExpired"


@dataclass(frozen=True)
class ObjectStorage(FileStorage):
    """Objects below a prefix. An object appears when its upload is complete.

    There are no locks. S3 replaces an index only if it is still the one that was read (If-Match);
    elsewhere the later of two indexes wins, and a warning says so.
    """

    url: str
    _guarded: dict[str, str | None] = field(default_factory=dict, repr=False, compare=False)
    """ETag of the index at the beginning of the block of `exclusive`; None if there was none."""

    @property
    def address(self) -> str:
        return self.url.rstrip("/")

    @property
    def is_remote(self) -> bool:
        return not self.url.startswith("memory:")

    @cached_property
    def _files(self) -> "tuple[fsspec.AbstractFileSystem, str]":
        """The file system and the prefix in it."""
        import fsspec

        if self.is_remote:
            refuse_when_offline(self.address)
        scheme = self.url.partition(":")[0]
        try:
            # Other machines write here, so an earlier listing may be out of date.
            return fsspec.url_to_fs(self.address, use_listings_cache=False)
        except Exception as error:  # of any library that fsspec loads
            extra = EXTRAS.get(scheme)
            hint = f"pip install 'moecast[{extra}]'" if extra else "use https://, s3:// or hf://"
            raise StorageError(f"{self.address} cannot be opened: {error}; {hint}") from error

    @contextmanager
    def _access(self, path: str) -> Iterator[tuple["fsspec.AbstractFileSystem", str]]:
        """Yields the file system and the object's name in it; translates its errors."""
        files, root = self._files
        name = f"{root}/{check_path(path)}" if path else root
        try:
            yield files, name
        except (FileNotFoundError, FileExistsError):
            raise
        except Exception as error:
            # Libraries of object stores raise their own classes: botocore's NoCredentialsError is
            # no OSError.
            if not isinstance(error, OSError) and not is_of_library(error):
                raise
            if is_replaced(error):
                raise ConflictError(
                    f"{self.address}/{path} was replaced while it was read; try again"
                ) from error
            reason = self._find_reason(error)
            hint = HINTS.get(
                error_code(reason), "check the address, the network and your credentials"
            )
            raise UnreachableError(
                f"{self.address}/{path} cannot be reached: {reason}; {hint}"
            ) from error

    def _find_reason(self, error: Exception) -> Exception:
        """Returns the error of a listing where the given one has a status only.

        S3 cannot say why it refuses a HEAD request: the answer has no body.
        """
        files, root = self._files
        if not error_code(error).isdigit():
            return error
        try:
            files.ls(root)
        except FileNotFoundError:
            return error
        except Exception as reason:  # of any library; the given error is raised in any case
            return reason
        return error

    def read(self, path: str, *, limit: int | None = None) -> bytes:
        if limit is not None:
            for _ in range(READS - 1):
                with suppress(ConflictError):
                    return super().read(path, limit=limit)
            return super().read(path, limit=limit)
        # One request: between two, another machine may replace the object.
        with self._access(path) as (files, name):
            return files.cat_file(name)

    @contextmanager
    def stream(self, path: str, *, offset: int = 0) -> Iterator[ByteStream]:
        with self._access(path) as (files, name):
            file = files.open(name, "rb")
        with file:
            file.seek(offset)
            yield ByteStream(offset, self._chunks(file, path))

    def _chunks(self, file: IO[bytes], path: str) -> Iterator[bytes]:
        # Only the reading is guarded here: an error of the caller, such as a full disk, is not the
        # storage's.
        while True:
            with self._access(path):
                chunk = file.read(CHUNK_BYTES)
            if not chunk:
                return
            yield chunk

    def names(self, folder: str = "") -> list[str]:
        with self._access(folder) as (files, name):
            if not files.exists(name):
                return []
            return sorted(path.rpartition("/")[2] for path in files.ls(name, detail=False))

    def size(self, path: str) -> int | None:
        with self._access(path) as (files, name):
            try:
                info = files.info(name)
            except FileNotFoundError:
                return None
            return info["size"] if info["type"] == "file" else None

    @contextmanager
    def open_new(self, path: str) -> Iterator[IO[bytes]]:
        # A local file first: an upload that is cut off must not look like a complete one.
        with tempfile.NamedTemporaryFile(prefix="moecast-") as file:
            yield file
            file.flush()
            with self._access(path) as (files, name):
                files.makedirs(files._parent(name), exist_ok=True)
                files.put_file(file.name, name)

    def write(self, path: str, data: bytes) -> None:
        with self._access(path) as (files, name):
            files.makedirs(files._parent(name), exist_ok=True)
            files.pipe_file(name, data)

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Remembers which index there is: `publish` replaces no other."""
        with self._access(INDEX) as (files, name):
            try:
                self._guarded["etag"] = files.info(name).get("ETag")
            except FileNotFoundError:
                self._guarded["etag"] = None
        try:
            yield
        finally:
            del self._guarded["etag"]

    def publish(
        self, files: Mapping[str, bytes], *, index: tuple[str, bytes], removed: Collection[str] = ()
    ) -> None:
        for path, data in files.items():
            self.write(path, data)
        if "etag" in self._guarded and self._has_conditional_writes:
            self._replace(*index, etag=self._guarded["etag"])
        else:
            self.write(*index)
        for path in removed:
            self.remove(path)

    def _replace(self, path: str, data: bytes, *, etag: str | None) -> None:
        """Writes a file if it is still the one with this ETag, or is not there if that is None.

        Raises ConflictError if it is not.
        """
        if self._write_if(path, data, {"IfNoneMatch": "*"} if etag is None else {"IfMatch": etag}):
            return
        # A write whose answer was lost is repeated by the library, and then meets itself.
        if self.has(path) and self.read(path) == data:
            return
        raise ConflictError(
            f"{self.address}/{path} is being changed by other publishers all the time; try again"
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
        with self._access(path) as (files, name):
            files.makedirs(files._parent(name), exist_ok=True)
            try:
                files.pipe_file(name, data, **condition)
            except Exception as error:  # of any library
                if error_code(error) not in CONFLICTS:
                    raise
                return False
        return True

    def create(self, path: str, data: bytes) -> bool:
        with self._access(path) as (files, name):
            files.makedirs(files._parent(name), exist_ok=True)
            try:
                files.pipe_file(name, data, mode="create")
            except FileExistsError:
                return False
            return True

    def remove(self, path: str) -> None:
        with self._access(path) as (files, name):
            if files.exists(name):
                files.rm_file(name)
