"""The one gate between bytes from outside and any parser: digest, size, and where they may lie."""

import hashlib
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from zoo.errors import DamagedError, ZooError

HEX64 = re.compile(r"[0-9a-f]{64}")
SAFE_PART = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")
"""No hidden files, no `..`, no drive letters, no separators of another system."""


def digest_of(data: bytes) -> str:
    """sha256 as 64 hex digits."""
    return hashlib.sha256(data).hexdigest()


def check(data: bytes, *, sha256: str, size: int | None, what: str) -> bytes:
    """The same bytes, when they are the promised ones; DamagedError otherwise."""
    if size is not None and len(data) != size:
        raise DamagedError(
            f"{what} is damaged: {len(data):,} bytes (or more) where {size:,} were promised. "
            "Nothing of it was read; get the entry again."
        )
    found = digest_of(data)
    if found != sha256:
        raise DamagedError(
            f"{what} is damaged: sha256 {found[:12]}... where {sha256[:12]}... was promised. "
            "Nothing of it was read; get the entry again."
        )
    return data


def check_path(path: str) -> str:
    """The same relative path, when it stays inside the entry; ZooError otherwise."""
    parts = PurePosixPath(path).parts
    if not parts or "/".join(parts) != path or not all(map(SAFE_PART.fullmatch, parts)):
        raise ZooError(
            f"the path {path!r} is not allowed: it must be relative, without '..', "
            "hidden names or backslashes"
        )
    return path


@contextmanager
def open_inside(folder: Path, path: str) -> Iterator[BinaryIO]:
    """A regular file under `folder`, for reading.

    Links are refused at every step below the folder, so that no entry can name a file outside it.
    FileNotFoundError when there is no such file.
    """
    current = folder
    for part in PurePosixPath(check_path(path)).parts:
        current = current / part
        if current.is_symlink():
            raise ZooError(f"{current} is a link; only plain files below the folder are read")
    handle = os.open(current, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    with os.fdopen(handle, "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise ZooError(f"{current} is not a plain file")
        yield file


def read_inside(folder: Path, path: str, *, limit: int) -> bytes:
    """At most `limit` + 1 bytes of it: one byte more than the limit, so that an appended one shows.

    Raises as `open_inside`.
    """
    with open_inside(folder, path) as file:
        return file.read(limit + 1)
