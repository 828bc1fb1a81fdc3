"""Where a trace lies: a folder (a disk of this machine, or one that machines share), or an address
that fsspec opens (s3://, gs://, az://, memory://).

A place keeps files by plain names. Each appears whole or not at all, and no lock is needed: several
machines write to one place, each file of its own, and locks of network disks can not be relied on.
"""

import hashlib
import os
import secrets
import shutil
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Protocol

from collect.errors import TraceError
from predictors.files import sync_folder

if TYPE_CHECKING:
    import fsspec

EXTRAS = {"s3": "s3", "gs": "gcs", "gcs": "gcs", "az": "azure", "abfs": "azure"}
"""Which of our extras brings the library for a scheme."""

TEMPORARY = ".tmp"


class Place(Protocol):
    """Files by plain name; `where` is how the user named it."""

    where: str

    def names(self) -> list[str]:
        """Every file, hidden and temporary ones left out, ascending; none where nothing is."""
        ...

    def size(self, name: str) -> int | None:
        """In bytes; None when there is no such plain file."""
        ...

    def read(self, name: str) -> bytes:
        """The whole; FileNotFoundError when there is none."""
        ...

    def sha256(self, name: str) -> str:
        """Digest of the bytes that lie there now."""
        ...

    def sink(self, name: str) -> Any:
        """Context manager of a binary file that takes its name when the block ends well."""
        ...

    def write(self, name: str, data: bytes) -> None:
        """Replaces the file in one step."""
        ...

    def create(self, name: str, data: bytes) -> bool:
        """The same, unless it is there already: then False, and nothing is done."""
        ...

    def remove(self, name: str) -> None:
        """Nothing to do where it is not there."""
        ...

    def fetch(self, name: str, path: Path) -> None:
        """Copies the file to a path of this machine."""
        ...

    def tidy(self, *, everything: bool) -> None:
        """Removes what dead writers of this machine left, or what any writer left."""
        ...

    def free_bytes(self) -> int | None:
        """Room for more; None where nobody knows."""
        ...


def place_of(where: "str | Path | Place") -> Place:
    """The place that a user named; a place is itself."""
    if isinstance(where, Path):
        return FolderPlace(where)
    if isinstance(where, str):
        return ObjectPlace(where) if "://" in where else FolderPlace(Path(where))
    return where


class FolderPlace:
    """A folder. On NFS too: a rename and a new hard link are single steps there."""

    def __init__(self, path: Path):
        self.path = path
        self.where = str(path)

    def names(self) -> list[str]:
        if not self.path.is_dir():
            return []
        return sorted(one.name for one in self.path.iterdir() if not one.name.startswith("."))

    def size(self, name: str) -> int | None:
        path = self.path / name
        return path.stat().st_size if path.is_file() and not path.is_symlink() else None

    def read(self, name: str) -> bytes:
        return (self.path / name).read_bytes()

    def sha256(self, name: str) -> str:
        with (self.path / name).open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    def _temporary(self, name: str) -> Path:
        # The token: containers on two machines may have the same name and number their processes
        # alike.
        owner = f"{socket.gethostname()}.{os.getpid()}.{secrets.token_hex(4)}"
        return self.path / f".{name}.{owner}{TEMPORARY}"

    @contextmanager
    def sink(self, name: str) -> Iterator[IO[bytes]]:
        temporary = self._temporary(name)
        try:
            with temporary.open("wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(self.path / name)
        finally:
            temporary.unlink(missing_ok=True)
        sync_folder(self.path)

    def write(self, name: str, data: bytes) -> None:
        with self.sink(name) as file:
            file.write(data)

    def create(self, name: str, data: bytes) -> bool:
        self.path.mkdir(parents=True, exist_ok=True)
        temporary = self._temporary(name)
        try:
            with temporary.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.link(temporary, self.path / name)
        except FileExistsError:
            return False
        finally:
            temporary.unlink(missing_ok=True)
        sync_folder(self.path)
        return True

    def remove(self, name: str) -> None:
        (self.path / name).unlink(missing_ok=True)

    def fetch(self, name: str, path: Path) -> None:
        shutil.copyfile(self.path / name, path)

    def tidy(self, *, everything: bool) -> None:
        host = f".{socket.gethostname()}."
        for path in self.path.glob(f".*{TEMPORARY}"):
            owner = path.name.removesuffix(TEMPORARY).split(".")[-2]
            dead = host in path.name and owner.isdigit() and not _alive(int(owner))
            if everything or dead:
                path.unlink(missing_ok=True)

    def free_bytes(self) -> int | None:
        existing = next(
            path for path in (self.path, *self.path.absolute().parents) if path.exists()
        )
        return shutil.disk_usage(existing).free


class ObjectPlace:
    """A prefix in an object store: an object appears when its upload is complete."""

    def __init__(self, url: str):
        self.where = url.rstrip("/")
        scheme = url.partition(":")[0]
        import fsspec

        try:
            self._files, self._root = fsspec.url_to_fs(self.where)
        except (ImportError, ValueError) as error:
            extra = EXTRAS.get(scheme)
            hint = f"pip install 'moecast[{extra}]'" if extra else "s3://, gs://, az:// work"
            raise TraceError(f"{self.where} can not be opened: {error}; {hint}") from error

    @contextmanager
    def _reached(self, name: str = "") -> "Iterator[tuple[fsspec.AbstractFileSystem, str]]":
        try:
            yield self._files, f"{self._root}/{name}".rstrip("/")
        except (FileNotFoundError, FileExistsError):
            raise
        except OSError as error:
            raise TraceError(
                f"{self.where}/{name} can not be reached: {error}; check the address, the network "
                "and your credentials"
            ) from error

    def names(self) -> list[str]:
        with self._reached() as (files, root):
            # Other machines write here: what was listed before may be out of date.
            files.invalidate_cache()
            if not files.exists(root):
                return []
            return sorted(one.rpartition("/")[2] for one in files.ls(root, detail=False))

    def size(self, name: str) -> int | None:
        with self._reached(name) as (files, at):
            files.invalidate_cache()
            return files.size(at) if files.isfile(at) else None

    def read(self, name: str) -> bytes:
        with self._reached(name) as (files, at):
            return files.cat_file(at)

    def sha256(self, name: str) -> str:
        with self._reached(name) as (files, at), files.open(at, "rb") as file:
            digest = hashlib.sha256()
            while piece := file.read(8 << 20):
                digest.update(piece)
            return digest.hexdigest()

    @contextmanager
    def sink(self, name: str) -> Iterator[IO[bytes]]:
        # Through a file of this machine: an upload that is cut off must not be taken for the end.
        with tempfile.NamedTemporaryFile(prefix="moecast-") as file:
            yield file
            file.flush()
            with self._reached(name) as (files, at):
                files.makedirs(files._parent(at), exist_ok=True)
                files.put_file(file.name, at)

    def write(self, name: str, data: bytes) -> None:
        with self._reached(name) as (files, at):
            files.makedirs(files._parent(at), exist_ok=True)
            files.pipe_file(at, data)

    def create(self, name: str, data: bytes) -> bool:
        with self._reached(name) as (files, at):
            files.makedirs(files._parent(at), exist_ok=True)
            try:
                files.pipe_file(at, data, mode="create")
            except FileExistsError:
                return False
            return True

    def remove(self, name: str) -> None:
        with self._reached(name) as (files, at):
            files.invalidate_cache()
            if files.exists(at):
                files.rm_file(at)

    def fetch(self, name: str, path: Path) -> None:
        with self._reached(name) as (files, at):
            files.get_file(at, str(path))

    def tidy(self, *, everything: bool) -> None:
        """Nothing lies there."""

    def free_bytes(self) -> int | None:
        return None


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return pid != os.getpid()
