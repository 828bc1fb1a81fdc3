"""Object stores, and whatever else fsspec reaches: s3://, gs://, az://, memory://."""

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from zoo.digest import check_path
from zoo.errors import UnreachableError, ZooError
from zoo.places.base import CHUNK_BYTES, Stream, WritablePlace
from zoo.places.offline import refuse_when_offline

if TYPE_CHECKING:
    import fsspec

EXTRAS = {"s3": "s3", "gs": "gcs", "gcs": "gcs", "az": "azure", "abfs": "azure"}
"""Which of our extras brings the library for a scheme."""


@dataclass(frozen=True)
class ObjectPlace(WritablePlace):
    """An object appears whole or not at all, so none is half written.

    But no lock keeps two writers apart: the later index wins. Let one process publish in a bucket.
    """

    url: str

    @property
    def where(self) -> str:
        return self.url.rstrip("/")

    @property
    def is_remote(self) -> bool:
        return not self.url.startswith("memory:")

    @cached_property
    def _files(self) -> "tuple[fsspec.AbstractFileSystem, str]":
        import fsspec

        if self.is_remote:
            refuse_when_offline(self.where)
        scheme = self.url.partition(":")[0]
        try:
            return fsspec.url_to_fs(self.where)
        except (ImportError, ValueError) as error:
            extra = EXTRAS.get(scheme)
            hint = f"pip install 'moecast[{extra}]'" if extra else "https://, s3://, hf:// work"
            raise ZooError(f"{self.where} cannot be opened: {error}; {hint}") from error

    @contextmanager
    def _reached(self, path: str) -> Iterator[tuple["fsspec.AbstractFileSystem", str]]:
        files, root = self._files
        at = f"{root}/{check_path(path)}"
        try:
            yield files, at
        except FileNotFoundError:
            raise
        except OSError as error:
            raise UnreachableError(
                f"{self.where}/{path} cannot be reached: {error}; check the address, the network "
                "and your credentials"
            ) from error

    @contextmanager
    def stream(self, path: str, *, offset: int = 0) -> Iterator[Stream]:
        with self._reached(path) as (files, at), files.open(at, "rb") as file:
            file.seek(offset)
            yield Stream(offset, iter(lambda: file.read(CHUNK_BYTES), b""))

    def has(self, path: str) -> bool:
        with self._reached(path) as (files, at):
            return files.isfile(at)

    def publish(
        self, files: Mapping[str, bytes], *, index: tuple[str, bytes], removed: Collection[str] = ()
    ) -> None:
        for path, data in (*files.items(), index):
            with self._reached(path) as (system, at):
                system.makedirs(system._parent(at), exist_ok=True)
                system.pipe_file(at, data)
        for path in removed:
            with self._reached(path) as (system, at):
                if system.exists(at):
                    system.rm_file(at)

    def names(self, folder: str) -> list[str]:
        with self._reached(folder) as (files, at):
            # Another process may have written since this one listed it.
            files.invalidate_cache()
            if not files.exists(at):
                return []
            return sorted(one.rpartition("/")[2] for one in files.ls(at, detail=False))
