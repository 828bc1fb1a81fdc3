"""Where a zoo's static files lie. Any place that can hand out bytes by path can serve a zoo."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import platformdirs

from predictors.files import write_atomic
from zoo.digest import check_path, read_inside
from zoo.errors import ZooError

BUILTIN = Path(__file__).resolve().parent / "builtin"


class Place(Protocol):
    """Read access to `index.json` and `blobs/sha256/DIGEST`. Nothing read from it is trusted."""

    @property
    def where(self) -> str:
        """For messages."""

    def read(self, path: str, *, limit: int) -> bytes:
        """At most `limit` + 1 bytes; FileNotFoundError when there is no such file."""


@dataclass(frozen=True)
class FolderPlace:
    """A folder; the only kind of place that can also be written to."""

    folder: Path

    @property
    def where(self) -> str:
        return str(self.folder)

    def read(self, path: str, *, limit: int) -> bytes:
        return read_inside(self.folder, path, limit=limit)

    def write(self, path: str, data: bytes) -> None:
        write_atomic(self.folder / check_path(path), data)

    def remove(self, path: str) -> None:
        (self.folder / check_path(path)).unlink(missing_ok=True)

    def names(self, path: str) -> list[str]:
        """Names in a folder of the place; empty when there is none."""
        folder = self.folder / check_path(path)
        return sorted(one.name for one in folder.iterdir()) if folder.is_dir() else []


def builtin() -> FolderPlace:
    """The zoo that ships inside the package."""
    return FolderPlace(BUILTIN)


def local() -> FolderPlace:
    """Where pulled entries are kept: MOECAST_ZOO, else the user's cache folder."""
    named = os.environ.get("MOECAST_ZOO")
    return FolderPlace(Path(named) if named else platformdirs.user_cache_path("moecast") / "zoo")


def folder_place(where: str) -> FolderPlace:
    """The place that a user named: `builtin`, or a folder."""
    if where == "builtin":
        return builtin()
    if "://" in where and not where.startswith("file://"):
        raise ZooError(f"{where!r}: zoos are read from and written to folders; name a folder")
    return FolderPlace(Path(where.removeprefix("file://")))
