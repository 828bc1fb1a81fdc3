"""A folder: the cache of what was pulled, the built-in zoo, a mounted disk."""

from collections.abc import Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock

from predictors.files import write_atomic
from zoo.digest import check_path, open_inside
from zoo.places.base import CHUNK_BYTES, Stream, WritablePlace


@dataclass(frozen=True)
class FolderPlace(WritablePlace):
    """Links are refused at every step below the folder."""

    folder: Path

    @property
    def is_remote(self) -> bool:
        return False

    @property
    def where(self) -> str:
        return str(self.folder)

    @contextmanager
    def stream(self, path: str, *, offset: int = 0) -> Iterator[Stream]:
        with open_inside(self.folder, path) as file:
            file.seek(offset)
            yield Stream(offset, iter(lambda: file.read(CHUNK_BYTES), b""))

    def has(self, path: str) -> bool:
        return (self.folder / check_path(path)).is_file()

    def publish(
        self, files: Mapping[str, bytes], *, index: tuple[str, bytes], removed: Collection[str] = ()
    ) -> None:
        for path, data in (*files.items(), index):
            write_atomic(self.folder / check_path(path), data)
        for path in removed:
            (self.folder / check_path(path)).unlink(missing_ok=True)

    def names(self, folder: str) -> list[str]:
        at = self.folder / check_path(folder)
        if not at.is_dir():
            return []
        # Hidden names are files that are still being written.
        return sorted(one.name for one in at.iterdir() if not one.name.startswith("."))

    def exclusive(self) -> AbstractContextManager[object]:
        self.folder.mkdir(parents=True, exist_ok=True)
        return FileLock(self.folder / ".lock")
