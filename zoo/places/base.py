"""What a place must do to hold a zoo: hand out bytes by path; to be written to, take them."""

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

CHUNK_BYTES = 1 << 20


@dataclass(frozen=True)
class Stream:
    """A file's bytes from `offset` on: what was asked for, or 0 where a place cannot resume."""

    offset: int
    chunks: Iterator[bytes]


class Place(ABC):
    """Read access to `index.json` and `blobs/sha256/DIGEST`. Nothing read from it is trusted."""

    @property
    def is_remote(self) -> bool:
        """Whether reading may leave this machine."""
        return True

    @property
    @abstractmethod
    def where(self) -> str:
        """What a user writes to name the place."""

    @abstractmethod
    def stream(self, path: str, *, offset: int = 0) -> AbstractContextManager[Stream]:
        """The file's bytes, a chunk at a time.

        Raises:
            FileNotFoundError: the place answers, and has no such file.
            UnreachableError: it does not answer, or answers with an error.
        """

    def read(self, path: str, *, limit: int) -> bytes:
        """At most `limit` + 1 bytes, so that an appended byte shows; raises as `stream`."""
        data = bytearray()
        with self.stream(path) as stream:
            for chunk in stream.chunks:
                data += chunk[: limit + 1 - len(data)]
                if len(data) > limit:
                    break
        return bytes(data)


class WritablePlace(Place):
    """A place to which entries can be added."""

    @property
    def has_front_page(self) -> bool:
        """Whether people look at the place itself, and a `README.md` is shown to them."""
        return False

    @abstractmethod
    def has(self, path: str) -> bool:
        """Whether there is such a file."""

    @abstractmethod
    def publish(
        self, files: Mapping[str, bytes], *, index: tuple[str, bytes], removed: Collection[str] = ()
    ) -> None:
        """Writes the files, then the index, then removes what it no longer names.

        Cut short at any point, the index that stands names complete files only.
        """

    @abstractmethod
    def names(self, folder: str) -> list[str]:
        """Names of the files in a folder of the place; empty when there is none."""

    def exclusive(self) -> AbstractContextManager[object]:
        """Held while the index is read and written anew, where the place can keep others out."""
        return nullcontext()
