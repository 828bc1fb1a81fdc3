"""Files that are whole or not there: temporary name in the same folder, fsync, rename, fsync."""

import ctypes
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from numbers import Integral, Real
from pathlib import Path
from typing import Any

import platformdirs

CACHE = "MOECAST_CACHE"

AT_FDCWD = -100
RENAME_EXCHANGE = 2
"""As in Linux's `fcntl.h` and `fs.h`."""


def cache_folder(name: str) -> Path:
    """Returns the folder NAME below MOECAST_CACHE, or else below the user's cache folder."""
    root = os.environ.get(CACHE)
    return (Path(root) if root else platformdirs.user_cache_path("moecast")) / name


def write_atomic(path: Path, data: bytes) -> None:
    """Replaces the file in one step: a reader, or a power cut, sees the old or the new, no part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    temporary = Path(name)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        # mkstemp makes files that only the owner can read; what is published is for everyone.
        temporary.chmod(0o644)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_folder(path.parent)


def write_json(path: Path, value: Any) -> None:
    """Replaces the file in one step. NaN is an error: what was not measured is null."""
    text = json.dumps(value, indent=2, default=to_plain_json, allow_nan=False) + "\n"
    write_atomic(path, text.encode())


def to_plain_json(value: Any) -> Any:
    """What JSON has no word for: paths and moments as text, numpy's numbers as numbers."""
    if isinstance(value, Path | datetime):
        return str(value)
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return float(value)
    raise TypeError(f"{type(value).__name__} cannot be written as JSON: {value!r}")


def sync_folder(folder: Path) -> None:
    """Makes the folder's names durable; without it a rename may be lost in a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def exchange_paths(one: Path, other: Path) -> bool:
    """Swaps the names of two folders or files in one step.

    False, and nothing done, where the system or the file system cannot (Linux's ext4, xfs, btrfs
    and tmpfs can).
    """
    rename = getattr(ctypes.CDLL(None), "renameat2", None)
    if rename is None:
        return False
    return rename(AT_FDCWD, bytes(one), AT_FDCWD, bytes(other), RENAME_EXCHANGE) == 0


@contextmanager
def replace_folder(path: Path) -> Iterator[Path]:
    """A temporary folder beside `path` that takes its name when the block ends without an error.

    What stood at `path` changes places with it, or is moved aside where the system cannot do that,
    and is removed last, so that no name ever holds half of either. After an error the temporary
    folder is gone and `path` is as it was.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}."))
    try:
        temporary.chmod(0o755)
        yield temporary
        for folder in [temporary, *(one for one in temporary.rglob("*") if one.is_dir())]:
            sync_folder(folder)
        if not path.exists():
            temporary.replace(path)
        elif not exchange_paths(temporary, path):
            aside = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}.old."))
            path.replace(aside)
            temporary.replace(path)
            shutil.rmtree(aside)
        sync_folder(path.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
