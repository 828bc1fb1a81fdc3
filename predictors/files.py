"""Atomic writes of files and folders: temporary name in the same folder, fsync, rename, fsync."""

import ctypes
import errno
import glob
import json
import os
import secrets
import shutil
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from numbers import Integral, Real
from pathlib import Path
from typing import IO, Any

import platformdirs

from predictors.errors import DiskFullError, MoecastError

CACHE = "MOECAST_CACHE"
OFFLINE = "MOECAST_OFFLINE"

TEMPORARY = ".tmp"
"""End of the names of files that are being written."""

LFS_POINTER = b"version https://git-lfs.github.com/spec/"
"""Start of the small file that Git leaves in place of one that Git LFS has not fetched."""

AT_FDCWD = -100
RENAME_EXCHANGE = 2
"""As in Linux's `fcntl.h` and `fs.h`."""


def find_cache_folder(name: str = "") -> Path | None:
    """Returns the folder NAME below MOECAST_CACHE, or else below the user's cache folder.

    None for a user who has no home folder: then nothing is cached.
    """
    root = os.environ.get(CACHE)
    if root:
        return Path(root, name)
    return platformdirs.user_cache_path("moecast") / name if has_home() else None


def cache_folder(name: str) -> Path:
    """Returns `find_cache_folder`, to write to; MoecastError if there is none."""
    folder = find_cache_folder(name)
    if folder is None:
        raise MoecastError(explain_no_home(CACHE))
    return folder


def has_home() -> bool:
    """Whether the user has a home folder: HOME, or the one of the account."""
    try:
        return Path.home().is_absolute()
    except RuntimeError:
        return False


def explain_no_home(*variables: str) -> str:
    """Says what to set where the user has no home folder, as in a container with any user id."""
    return (
        f"there is no home folder to write to: HOME is not set, and the user id {os.getuid()} has "
        f"no account with one. Set {' or '.join(['HOME', *variables])} to a folder"
    )


def path_exists(path: str | Path) -> bool:
    """Whether there is a file or folder; False for text that cannot be the name of one."""
    try:
        return Path(path).exists()
    except (OSError, ValueError):
        return False


def is_offline() -> bool:
    """Whether the user forbids the network: `MOECAST_OFFLINE` is set to anything but 0."""
    return os.environ.get(OFFLINE, "0") not in ("", "0")


def expand_home(path: str | Path) -> Path:
    """Returns a path with the home folder in place of `~` or `~USER`.

    Raises:
        MoecastError: there is no such user, or the user has no home folder.
    """
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise MoecastError(
            f"{path}: {Path(path).parts[0]} has no home folder on this machine; write the path "
            "out, or set HOME"
        ) from error


def require_plain_file(path: Path, error: type[MoecastError] = MoecastError) -> Path:
    """Returns the path of a file that is about to be read; of a missing one, and of a folder, too.

    Raises:
        error: it cannot be read, is a link to nothing, a Git LFS pointer in place of the file, or a
            pipe, a socket or a device, which reading might wait for.
    """
    if path.is_symlink() and not path.exists():
        raise error(
            f"{path} is a link to {path.readlink()}, which is not there: restore that file, or "
            "remove the link and fetch this one again (a model of the Hub: model.local_only=false)"
        )
    if not path.exists() or path.is_dir():
        return path
    if not path.is_file():
        raise error(
            f"{path} is a pipe, a socket or a device, not a plain file; write its content to a "
            "file and name that"
        )
    try:
        with path.open("rb") as file:
            begin = file.read(len(LFS_POINTER))
    except OSError as failure:
        raise error(f"{path} cannot be read: {failure.strerror}") from failure
    refuse_lfs_pointer(begin, str(path), error)
    return path


def refuse_lfs_pointer(data: bytes, what: str, error: type[MoecastError]) -> None:
    """Raises `error` if a file begins with `data` as those do that Git LFS has not fetched yet."""
    if data.startswith(LFS_POINTER):
        raise error(
            f"{what} is a Git LFS pointer, not the file itself: run git lfs pull in its "
            "repository, or download the file"
        )


def read_text_file(path: Path) -> str:
    """Returns the text of a file that the user names.

    Raises:
        MoecastError: as `require_plain_file`, or its content is no text in UTF-8.
        OSError: it cannot be read.
    """
    try:
        text = require_plain_file(path).read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise MoecastError(
            f"{path} is not text in UTF-8 (byte {error.start} is {error.object[error.start]:#x}); "
            "convert text of another encoding with iconv -f ENCODING -t UTF-8"
        ) from error
    if "\0" in text:
        raise MoecastError(f"{path} is not text: it has null bytes; name a text file")
    return text


def temporary_prefix(path: Path) -> str:
    """Returns the hidden name of a file that is being written, up to the dot before the last part.

    It names the process, so that what a killed one has left can be removed.
    """
    return f".{path.name}.{socket.gethostname()}.{os.getpid()}."


def remove_abandoned(folder: Path, name: str = "", *, everything: bool = False) -> int:
    """Removes what killed writers left in a folder; returns the number of files and folders.

    Args:
        name: of what was being written; default: anything.
        everything: what processes of other machines write too, which may be alive.
    """
    # What only reads needs no list of processes.
    import psutil

    removed, host = 0, f".{socket.gethostname()}."
    for path in folder.glob(f".{glob.escape(name)}*{TEMPORARY}"):
        process = path.name.removesuffix(TEMPORARY).split(".")[-2]
        owner = int(process) if host in path.name and process.isdigit() else None
        is_dead = owner == os.getpid() or (owner is not None and not psutil.pid_exists(owner))
        if everything or is_dead:
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)
            removed += 1
    return removed


@contextmanager
def open_atomic(path: Path, *, replaces: bool = True) -> Iterator[IO[bytes]]:
    """Opens a file that takes its name when the block ends without an error, all of it on the disk.

    Without `replaces`, FileExistsError is raised if another has the name by then.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # The random token: containers on two machines may have the same host name and process ids.
    temporary = path.parent / f"{temporary_prefix(path)}{secrets.token_hex(4)}{TEMPORARY}"
    try:
        with temporary.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        if replaces:
            temporary.replace(path)
        else:
            os.link(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_folder(path.parent)


def write_atomic(path: Path, data: bytes) -> None:
    """Replaces a file in one step: readers, and a power cut, see the old or the new content."""
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with open_atomic(path) as file:
            file.write(data)
            # Readable for everybody, whatever this user's mask is.
            Path(file.name).chmod(0o644)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DiskFullError(
                f"{path} could not be written: the disk is full ({len(data):,} bytes needed, "
                f"{shutil.disk_usage(path.parent).free:,} free). What was there before is "
                "unchanged; free some space and run the same command again"
            ) from error
        raise


def write_json(path: Path, value: Any) -> None:
    """Replaces a file in one step. NaN is an error: a value that was not measured is null."""
    text = json.dumps(value, indent=2, default=to_plain_json, allow_nan=False) + "\n"
    write_atomic(path, text.encode())


def to_plain_json(value: Any) -> Any:
    """Converts paths and times to text and NumPy's numbers to Python's."""
    if isinstance(value, Path | datetime):
        return str(value)
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return float(value)
    raise TypeError(f"{type(value).__name__} cannot be written as JSON: {value!r}")


def sync_folder(folder: Path) -> None:
    """Flushes a folder's names; without it, a power cut may undo a rename."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def exchange_paths(path: Path, other: Path) -> bool:
    """Swaps the names of two folders or files in one step.

    Returns False, with nothing changed, if the system or file system cannot (Linux's ext4, xfs,
    btrfs and tmpfs can).
    """
    rename = getattr(ctypes.CDLL(None), "renameat2", None)
    if rename is None:
        return False
    return rename(AT_FDCWD, bytes(path), AT_FDCWD, bytes(other), RENAME_EXCHANGE) == 0


def publish_folder(folder: Path, path: Path) -> None:
    """Gives a complete folder the name `path`; the one that had it is then at `folder`, or gone."""
    if not path.exists():
        folder.replace(path)
    elif not exchange_paths(folder, path):
        aside = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}.old."))
        path.replace(aside)
        folder.replace(path)
        shutil.rmtree(aside)
    sync_folder(path.parent)


@contextmanager
def replace_folder(path: Path) -> Iterator[Path]:
    """Yields a temporary folder that takes the name `path` if the block ends without an error.

    The folder that was at `path` is swapped with it, or moved aside if the system cannot swap, and
    removed last, so that neither is ever there in part. After an error, the temporary folder is
    removed and `path` is unchanged.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    remove_abandoned(path.parent, path.name)
    temporary = Path(tempfile.mkdtemp(TEMPORARY, temporary_prefix(path), path.parent))
    try:
        temporary.chmod(0o755)
        yield temporary
        for folder in [temporary, *(inner for inner in temporary.rglob("*") if inner.is_dir())]:
            sync_folder(folder)
        publish_folder(temporary, path)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
