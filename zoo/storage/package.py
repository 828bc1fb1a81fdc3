"""Storage in an installed wheel: `package://NAME`, the files as package data."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from importlib.resources import files
from importlib.resources.abc import Traversable

from zoo.digest import check_path
from zoo.errors import StorageError
from zoo.storage.base import CHUNK_BYTES, ByteStream, Storage

SCHEME = "package://"


@dataclass(frozen=True)
class PackageStorage(Storage):
    """Package data, read through importlib so that a zipped wheel works too."""

    package: str

    @property
    def is_remote(self) -> bool:
        return False

    @property
    def address(self) -> str:
        return f"{SCHEME}{self.package}"

    @cached_property
    def _root(self) -> Traversable:
        try:
            return files(self.package)
        except ModuleNotFoundError as error:
            raise StorageError(
                f"{self.address}: no package {self.package!r} is installed; pip install the wheel "
                "that contains it"
            ) from error

    @contextmanager
    def stream(self, path: str, *, offset: int = 0) -> Iterator[ByteStream]:
        at = self._root.joinpath(*check_path(path).split("/"))
        if not at.is_file():
            raise FileNotFoundError(f"{self.address}/{path}")
        with at.open("rb") as file:
            file.seek(offset)
            yield ByteStream(offset, iter(lambda: file.read(CHUNK_BYTES), b""))
