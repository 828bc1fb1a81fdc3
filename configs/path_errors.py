"""Explains system errors about a path that the user named, such as a folder in place of a file."""

import errno
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

CORRECTABLE = {
    errno.EACCES,
    errno.EEXIST,
    errno.EISDIR,
    errno.ELOOP,
    errno.ENAMETOOLONG,
    errno.ENOENT,
    errno.ENOTDIR,
    errno.EPERM,
    errno.EROFS,
}
"""Errors about the path itself; others, such as EIO, are failures of the machine."""


def explain_path_error(error: OSError, options: Iterable[tuple[str, Any]]) -> str | None:
    """Returns the message for an error about a path, with the option that named it or a parent.

    None for an error of another kind.
    """
    if error.errno not in CORRECTABLE or not isinstance(error.filename, str | bytes):
        return None
    path = Path(os.path.abspath(os.fsdecode(error.filename)))  # noqa: PTH100
    message = f"{os.fsdecode(error.filename)}: {error.strerror}"
    named = [
        (len(str(value)), f"{key}={value}")
        for key, value in options
        if isinstance(value, str | Path) and is_or_contains(str(value), path)
    ]
    return f"{max(named)[1]}: {message}" if named else message


def is_or_contains(value: str, path: Path) -> bool:
    if not value or "\0" in value:
        return False
    named = Path(os.path.abspath(os.path.expanduser(value)))  # noqa: PTH100, PTH111
    return named == path or (value not in (".", "/") and named in path.parents)
