"""A zoo inside an installed wheel: `package://NAME`, its files as package data."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from importlib.resources import files
from importlib.resources.abc import Traversable

from zoo.digest import check_path
from zoo.errors import ZooError
from zoo.places.base import CHUNK_BYTES, Place, Stream

SCHEME = "package://"


@dataclass(frozen=True)
class PackagePlace(Place):
    """Read through importlib, so a wheel that is imported from a zip file serves as well."""

    package: str

    @property
    def is_remote(self) -> bool:
        return False

    @property
    def where(self) -> str:
        return f"{SCHEME}{self.package}"

    @cached_property
    def _root(self) -> Traversable:
        try:
            return files(self.package)
        except ModuleNotFoundError as error:
            raise ZooError(
                f"{self.where}: no package {self.package!r} is installed; pip install the wheel "
                "that has it"
            ) from error

    @contextmanager
    def stream(self, path: str, *, offset: int = 0) -> Iterator[Stream]:
        at = self._root.joinpath(*check_path(path).split("/"))
        if not at.is_file():
            raise FileNotFoundError(f"{self.where}/{path}")
        with at.open("rb") as file:
            file.seek(offset)
            yield Stream(offset, iter(lambda: file.read(CHUNK_BYTES), b""))
