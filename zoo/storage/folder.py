"""Storage in a folder: the cache, the built-in zoo, a shared disk.

Not through fsspec: its local files follow links, are written in place and without fsync, and have
neither locks nor a creation that fails if the file exists.
"""

import errno
import shutil
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from filelock import FileLock

from predictors.errors import DiskFullError, MoecastError
from predictors.files import open_atomic, remove_abandoned, write_atomic
from zoo.digest import HashingFile, check_path, open_inside
from zoo.errors import DamagedError, UnreachableError, ZooError
from zoo.storage.base import CHUNK_BYTES, FileStorage, Storage

LEAST_SECONDS, LEAST_BYTES_PER_SECOND = 60.0, 10_000
"""A download that is slower ends."""


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

    @contextmanager
    def stream(self, path: str) -> Iterator[Iterator[bytes]]:
        with open_inside(self.folder, path) as file:
            yield iter(lambda: file.read(CHUNK_BYTES), b"")

    def names(self, folder: str = "") -> list[str]:
        at = self.folder / check_path(folder) if folder else self.folder
        if not at.is_dir():
            return []
        # Hidden names are files that are still being written.
        return sorted(path.name for path in at.iterdir() if not path.name.startswith("."))

    def exclusive(self) -> AbstractContextManager[object]:
        return self._lock(".lock")

    def changing_blobs(self) -> AbstractContextManager[object]:
        return self._lock(".blobs.lock")

    def _lock(self, name: str) -> FileLock:
        self.folder.mkdir(parents=True, exist_ok=True)
        return FileLock(self.folder / name)

    def size(self, path: str) -> int | None:
        at = self.folder / check_path(path)
        return at.stat().st_size if at.is_file() and not at.is_symlink() else None

    def write(self, path: str, data: bytes) -> None:
        write_atomic(self.folder / check_path(path), data)

    def open_new(self, path: str) -> AbstractContextManager[IO[bytes]]:
        return open_atomic(self.folder / check_path(path))

    def has_bytes(self, path: str, sha256: str) -> bool:
        """Whether the file is there, every byte of it intact."""
        try:
            return self.sha256(path) == sha256
        except (FileNotFoundError, NotADirectoryError, ZooError):
            return False

    def fetch(
        self,
        source: Storage,
        path: str,
        sha256: str,
        size: int,
        *,
        what: str,
        error: type[MoecastError] = DamagedError,
    ) -> None:
        """Downloads a file, which takes its name when all of it is here with the right digest.

        Raises:
            error: it is missing in the source, or has another size or digest.
            UnreachableError: the download was interrupted, or is too slow.
            DiskFullError: it does not fit on the disk.
        """
        deadline = time.monotonic() + LEAST_SECONDS + size / LEAST_BYTES_PER_SECOND
        try:
            with self.open_new(path) as file, source.stream(path) as chunks:
                sink = HashingFile(file)
                for chunk in chunks:
                    sink.write(chunk)
                    if sink.size > size or time.monotonic() > deadline:
                        break  # an endless answer must not fill the disk, nor take for ever
                if sink.size < size:
                    raise UnreachableError(
                        f"{what}: {sink.size:,} of {size:,} bytes came from {source.address}; run "
                        "the command again to get what is missing"
                    )
                if sink.size > size or sink.hexdigest() != sha256:
                    raise error(
                        f"{what} in {source.address} is damaged: got {sink.size:,} bytes with "
                        f"sha256 {sink.hexdigest()[:12]}..., expected {size:,} with "
                        f"{sha256[:12]}.... Nothing of it was read"
                    )
                Path(file.name).chmod(0o644)
        except FileNotFoundError as missing:
            raise error(f"{what} is missing in {source.address}") from missing
        except OSError as failure:
            if failure.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise DiskFullError(
                f"{what}: the disk of {self.address} is full; free some space and run the command "
                "again, or set MOECAST_CACHE to a folder on another disk"
            ) from failure

    def create(self, path: str, data: bytes) -> bool:
        self.folder.mkdir(parents=True, exist_ok=True)
        try:
            with open_atomic(self.folder / check_path(path), replaces=False) as file:
                file.write(data)
        except FileExistsError:
            return False
        return True

    def remove(self, path: str) -> None:
        (self.folder / check_path(path)).unlink(missing_ok=True)

    def free_bytes(self) -> int:
        existing = next(
            path for path in (self.folder, *self.folder.absolute().parents) if path.exists()
        )
        return shutil.disk_usage(existing).free

    def remove_temporary(self, folder: str = "", *, everything: bool) -> int:
        return remove_abandoned(self.folder / folder, everything=everything)
