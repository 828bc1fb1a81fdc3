"""Checks of bytes from outside before any parser sees them: digest, size and path."""

import hashlib
import os
import re
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import IO, Any, BinaryIO

from predictors.files import refuse_lfs_pointer
from zoo.errors import DamagedError, ZooError

HEX64 = re.compile(r"[0-9a-f]{64}")
SAFE_PART = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")
"""Excludes hidden files, `..`, drive letters and the separators of other systems."""


def hash_bytes(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def read_checked(read: Callable[[], bytes], *, sha256: str, size: int | None, what: str) -> bytes:
    """Reads bytes and checks them as `check_digest`; DamagedError too if they are missing."""
    try:
        data = read()
    except FileNotFoundError as error:
        raise DamagedError(f"{what} is missing; pull the entry again") from error
    return check_digest(data, sha256=sha256, size=size, what=what)


def check_digest(data: bytes, *, sha256: str, size: int | None, what: str) -> bytes:
    """Returns the bytes if size and digest are as expected; raises DamagedError otherwise."""
    refuse_lfs_pointer(data, what, DamagedError)
    if size is not None and len(data) != size:
        fault = f"got {len(data):,} bytes (or more), expected {size:,}"
    elif (actual := hash_bytes(data)) != sha256:
        fault = f"got sha256 {actual[:12]}..., expected {sha256[:12]}..."
    else:
        return data
    raise DamagedError(
        f"{what} is damaged: {fault}. Nothing of it was parsed; pull the entry again."
    )


def check_path(path: str) -> str:
    """Returns the relative path if it stays inside its folder; raises ZooError otherwise."""
    parts = PurePosixPath(path).parts
    if not parts or "/".join(parts) != path or not all(map(SAFE_PART.fullmatch, parts)):
        raise ZooError(
            f"the path {path!r} is not allowed: it must be relative, without '..', "
            "hidden names or backslashes"
        )
    return path


class HashingFile:
    """A binary file that hashes what is written, so that its digest needs no second read."""

    def __init__(self, file: IO[bytes]):
        self._file = file
        self._sha256 = hashlib.sha256()
        self.size = 0
        self.closed = False

    def write(self, data: Any, /) -> int:
        self._sha256.update(data)
        self.size += memoryview(data).nbytes
        return self._file.write(data)

    def flush(self) -> None:
        self._file.flush()

    def hexdigest(self) -> str:
        return self._sha256.hexdigest()


@contextmanager
def open_inside(folder: Path, path: str) -> Iterator[BinaryIO]:
    """Opens a plain file below `folder` for reading; ZooError if it is not allowed.

    Links are refused at every step below the folder, so that no path leads outside it.
    """
    current = folder
    try:
        for part in PurePosixPath(check_path(path)).parts:
            current = current / part
            if current.is_symlink():
                raise ZooError(f"{current} is a link; only plain files below the folder are read")
        handle = os.open(current, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except (FileNotFoundError, NotADirectoryError):
        raise
    except OSError as error:
        raise ZooError(f"{current} cannot be read: {error.strerror}") from error
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise ZooError(f"{current} is not a plain file")
    with os.fdopen(handle, "rb") as file:
        yield file


def read_inside(folder: Path, path: str, limit: int) -> bytes:
    """Reads at most `limit` + 1 bytes, so that an appended byte shows; raises as `open_inside`."""
    with open_inside(folder, path) as file:
        return file.read(limit + 1)
