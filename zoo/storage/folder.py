"""Storage in a folder (cache, built-in zoo, shared disk) and in an installed wheel."""

import fcntl
import os
import secrets
import shutil
import socket
import sys
from collections.abc import Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cached_property
from importlib.machinery import ModuleSpec
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import IO

from filelock import FileLock

from predictors.files import sync_folder, write_atomic
from zoo.digest import check_path, open_inside
from zoo.errors import StorageError
from zoo.storage.base import CHUNK_BYTES, ByteStream, FileStorage, Storage

TEMPORARY = ".tmp"


@dataclass(frozen=True)
class FolderStorage(FileStorage):
    """Files below a folder. Links are refused at every step below it.

    Works on NFS: a rename and a new hard link are single steps there too.
    """

    folder: Path

    @property
    def is_remote(self) -> bool:
        return False

    @property
    def address(self) -> str:
        return str(self.folder)

    @property
    def canonical_address(self) -> str:
        return str(self.folder.resolve())

    @contextmanager
    def stream(self, path: str, *, offset: int = 0) -> Iterator[ByteStream]:
        with open_inside(self.folder, path) as file:
            file.seek(offset)
            yield ByteStream(offset, iter(lambda: file.read(CHUNK_BYTES), b""))

    def names(self, folder: str = "") -> list[str]:
        at = self.folder / check_path(folder) if folder else self.folder
        if not at.is_dir():
            return []
        # Hidden names are files that are still being written.
        return sorted(path.name for path in at.iterdir() if not path.name.startswith("."))

    def publish(
        self, files: Mapping[str, bytes], *, index: tuple[str, bytes], removed: Collection[str] = ()
    ) -> None:
        # Readable for everybody, whatever this user's mask is.
        for path, data in (*files.items(), index):
            write_atomic(self.folder / check_path(path), data)
        for path in removed:
            self.remove(path)

    def exclusive(self) -> AbstractContextManager[object]:
        self.folder.mkdir(parents=True, exist_ok=True)
        return FileLock(self.folder / ".lock")

    def keeping_blobs(self) -> AbstractContextManager[object]:
        return self._lock_blobs(fcntl.LOCK_SH)

    def removing_blobs(self) -> AbstractContextManager[object]:
        return self._lock_blobs(fcntl.LOCK_EX)

    @contextmanager
    def _lock_blobs(self, kind: int) -> Iterator[None]:
        self.folder.mkdir(parents=True, exist_ok=True)
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
        handle = os.open(self.folder / ".blobs.lock", flags, 0o644)
        try:
            fcntl.flock(handle, kind)
            yield
        finally:
            os.close(handle)

    def size(self, path: str) -> int | None:
        at = self.folder / check_path(path)
        return at.stat().st_size if at.is_file() and not at.is_symlink() else None

    @contextmanager
    def open_new(self, path: str) -> Iterator[IO[bytes]]:
        with self._temporary(path) as (at, temporary, file):
            yield file
            _flush(file)
            temporary.replace(at)
        sync_folder(at.parent)

    def create(self, path: str, data: bytes) -> bool:
        with self._temporary(path) as (at, temporary, file):
            file.write(data)
            _flush(file)
            try:
                os.link(temporary, at)
            except FileExistsError:
                return False
        sync_folder(at.parent)
        return True

    @contextmanager
    def _temporary(self, path: str) -> Iterator[tuple[Path, Path, IO[bytes]]]:
        """Yields the final path, the temporary one in the same folder, and the latter opened."""
        at = self.folder / check_path(path)
        at.parent.mkdir(parents=True, exist_ok=True)
        # The random token: containers on two machines may have the same host name and process ids.
        owner = f"{socket.gethostname()}.{os.getpid()}.{secrets.token_hex(4)}"
        temporary = at.parent / f".{at.name}.{owner}{TEMPORARY}"
        try:
            with temporary.open("wb") as file:
                yield at, temporary, file
        finally:
            temporary.unlink(missing_ok=True)

    def remove(self, path: str) -> None:
        (self.folder / check_path(path)).unlink(missing_ok=True)

    def free_bytes(self) -> int | None:
        existing = next(
            path for path in (self.folder, *self.folder.absolute().parents) if path.exists()
        )
        return shutil.disk_usage(existing).free

    def remove_temporary(self, *, everything: bool) -> None:
        host = f".{socket.gethostname()}."
        for path in self.folder.glob(f".*{TEMPORARY}"):
            process = path.name.removesuffix(TEMPORARY).split(".")[-2]
            is_dead = host in path.name and process.isdigit() and not _is_alive(int(process))
            if everything or is_dead:
                path.unlink(missing_ok=True)


def _flush(file: IO[bytes]) -> None:
    file.flush()
    os.fsync(file.fileno())


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return process != os.getpid()


def find_package(name: str) -> ModuleSpec | None:
    """Finds an installed package without importing it or any other: nothing of it is run."""
    spec, path = None, None
    for part in name.split("."):
        if not part.isidentifier():
            return None
        found = (
            finder.find_spec(f"{spec.name}.{part}" if spec else part, path)
            for finder in sys.meta_path
        )
        spec = next((one for one in found if one is not None), None)
        if spec is None or spec.submodule_search_locations is None:
            return None
        path = spec.submodule_search_locations
    return spec


@dataclass(frozen=True)
class PackageStorage(Storage):
    """Package data (`package://NAME`), also of a zipped wheel; the package is not imported."""

    package: str

    @property
    def is_remote(self) -> bool:
        return False

    @property
    def address(self) -> str:
        return f"package://{self.package}"

    @cached_property
    def _root(self) -> Traversable:
        spec = find_package(self.package)
        reader = getattr(spec and spec.loader, "get_resource_reader", lambda _: None)(self.package)
        if reader is None:
            raise StorageError(
                f"{self.address}: no package {self.package!r} is installed; pip install the wheel "
                "that contains it"
            )
        return reader.files()

    @contextmanager
    def stream(self, path: str, *, offset: int = 0) -> Iterator[ByteStream]:
        at = self._root.joinpath(*check_path(path).split("/"))
        if not at.is_file():
            raise FileNotFoundError(f"{self.address}/{path}")
        with at.open("rb") as file:
            file.seek(offset)
            yield ByteStream(offset, iter(lambda: file.read(CHUNK_BYTES), b""))
