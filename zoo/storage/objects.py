"""Storage in an object store that fsspec reaches: s3://, gs://, az://, memory://."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import IO, TYPE_CHECKING

from zoo.digest import check_path
from zoo.errors import StorageError, UnreachableError
from zoo.storage.base import CHUNK_BYTES, ByteStream, FileStorage, refuse_when_offline

if TYPE_CHECKING:
    import fsspec

EXTRAS = {"s3": "s3", "gs": "gcs", "gcs": "gcs", "az": "azure", "abfs": "azure"}
"""The extra of moecast that installs the library for a scheme."""


LIBRARIES = ("botocore", "aiobotocore", "s3fs", "gcsfs", "google", "adlfs", "azure", "aiohttp")
"""Packages that fsspec reaches object stores with."""


def is_of_library(error: Exception) -> bool:
    """Returns whether the error's class belongs to a library of an object store."""
    return type(error).__module__.partition(".")[0] in LIBRARIES


@dataclass(frozen=True)
class ObjectStorage(FileStorage):
    """Objects below a prefix. An object appears when its upload is complete.

    There are no locks: of two writers of one zoo, the later index wins. Let one process publish in
    a bucket.
    """

    url: str

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
            raise UnreachableError(
                f"{self.address}/{path} cannot be reached: {error}; check the address, the network "
                "and your credentials"
            ) from error

    def read(self, path: str, *, limit: int | None = None) -> bytes:
        if limit is not None:
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
