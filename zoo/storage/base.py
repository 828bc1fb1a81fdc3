"""The interfaces of storage: reading by path, publishing, and single-file operations."""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import IO, Any, ClassVar

from predictors.errors import DiskFullError
from predictors.files import OFFLINE, is_offline
from zoo.errors import UnreachableError

CHUNK_BYTES = 1 << 20


class Storage(ABC):
    """Read access to files by relative path. Nothing read from it is trusted."""

    @property
    def is_remote(self) -> bool:
        """Whether reading may leave this machine."""
        return True

    @property
    @abstractmethod
    def address(self) -> str:
        """The folder or address by which a user names the storage."""

    @abstractmethod
    def stream(self, path: str) -> AbstractContextManager[Iterator[bytes]]:
        """Opens a file to be read chunk by chunk.

        Raises FileNotFoundError if there is none, UnreachableError if the storage fails to answer.
        """

    def read(self, path: str, *, limit: int | None = None) -> bytes:
        """Reads a file, or its first `limit` + 1 bytes so that an appended byte shows."""
        with self.stream(path) as chunks:
            return join_chunks(chunks, limit=limit)

    def sha256(self, path: str) -> str:
        digest = hashlib.sha256()
        with self.stream(path) as chunks:
            for chunk in chunks:
                digest.update(chunk)
        return digest.hexdigest()


class WritableStorage(Storage):
    """Storage in which a zoo can be published."""

    has_front_page: ClassVar[bool] = False
    """Whether the storage shows a `README.md` to its visitors."""

    @abstractmethod
    def has(self, path: str) -> bool:
        """Whether there is such a file."""

    @abstractmethod
    def names(self, folder: str = "") -> list[str]:
        """Names in a folder, ascending, without hidden ones; empty if there is no such folder."""

    @abstractmethod
    def publish(
        self,
        files: Mapping[str, bytes],
        index: tuple[str, bytes],
        removed: Iterable[str],
        seen: Any,
    ) -> None:
        """Writes the files, then the index, then removes the files that it no longer names.

        Interrupted at any point, the index that is in place names complete files only. `seen` is
        what `exclusive` yielded. Raises ConflictError, with the index unchanged, if another
        publisher replaced it since then, where the storage has conditional writes.
        """

    @abstractmethod
    def exclusive(self) -> AbstractContextManager[Any]:
        """Guards the index between a read and `publish`: by a lock, or by a conditional write."""

    def changing_blobs(self) -> AbstractContextManager[object]:
        """Waits for the pull, or the removal of blobs, that is in progress, if there are locks."""
        return nullcontext()

    def remove_temporary(self, folder: str = "", *, everything: bool) -> int:  # noqa: ARG002
        """Removes temporary files of dead processes of this machine, or of any; returns how many.

        Most storages have none: a file is there when it has been sent.
        """
        return 0


class FileStorage(WritableStorage):
    """Storage with operations on single files. Each file appears whole or not at all.

    None of them takes a lock, so that several machines can write different files at once: locks of
    network file systems are not reliable.
    """

    @abstractmethod
    def size(self, path: str) -> int | None:
        """Size in bytes; None if there is no such plain file."""

    @abstractmethod
    def open_new(self, path: str) -> AbstractContextManager[IO[bytes]]:
        """Opens a binary file that takes its name when the block ends without an error."""

    @abstractmethod
    def write(self, path: str, data: bytes) -> None:
        """Creates or replaces a file in one step."""

    @abstractmethod
    def create(self, path: str, data: bytes) -> bool:
        """Writes a file unless it exists; returns False, with nothing changed, if it does."""

    @abstractmethod
    def remove(self, path: str) -> None:
        """Removes a file; does nothing if there is none."""

    def has(self, path: str) -> bool:
        return self.size(path) is not None

    def publish(
        self,
        files: Mapping[str, bytes],
        index: tuple[str, bytes],
        removed: Iterable[str],
        seen: Any,
    ) -> None:
        for path, data in files.items():
            self.write(path, data)
        self.write_index(*index, seen)
        for path in removed:
            self.remove(path)

    def write_index(self, path: str, data: bytes, seen: Any) -> None:  # noqa: ARG002
        self.write(path, data)

    def free_bytes(self) -> int | None:
        """Free space; None if the storage does not report it."""
        return None

    def require_space(self, needed: int, use: str, *, advice: str) -> None:
        """Raises DiskFullError if the storage reports less free space than the use needs."""
        free = self.free_bytes()
        if free is not None and free < needed:
            raise DiskFullError(
                f"{self.address}: {use} needs up to {needed:,} bytes, {free:,} are free. {advice}"
            )


def join_chunks(chunks: Iterable[bytes], *, limit: int | None) -> bytes:
    """Returns all bytes, or the first `limit` + 1 of them: the rest is not waited for."""
    data = bytearray()
    for chunk in chunks:
        data += chunk if limit is None else chunk[: limit + 1 - len(data)]
        if limit is not None and len(data) > limit:
            break
    return bytes(data)


def refuse_when_offline(address: str) -> None:
    """Raises UnreachableError if `MOECAST_OFFLINE` forbids the network."""
    if is_offline():
        raise UnreachableError(
            f"{address} is on the network, and {OFFLINE} is set; unset it, or name a folder"
        )
