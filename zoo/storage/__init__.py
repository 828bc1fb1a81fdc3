"""Storage of a zoo's or a trace's files: a folder, a web server, an object store, the Hub."""

from pathlib import Path

from predictors.errors import MoecastError
from predictors.files import expand_home
from zoo.errors import StorageError
from zoo.storage.base import ByteStream, FileStorage, Storage, WritableStorage
from zoo.storage.folder import FolderStorage, PackageStorage

__all__ = [
    "ByteStream",
    "FileStorage",
    "FolderStorage",
    "Storage",
    "WritableStorage",
    "open_storage",
]


def open_storage(where: str | Path) -> Storage:
    """Returns the storage at a folder or an address; nothing is read yet.

    Raises ZooError for an hf:// address that names no repository and for `~USER` without a home.
    """
    if isinstance(where, Path):
        return FolderStorage(where)
    if where.startswith(("http://", "https://")):
        from zoo.storage.http import HttpStorage

        return HttpStorage(where)
    if where.startswith("hf://"):
        from zoo.storage.hub import open_hub_storage

        return open_hub_storage(where)
    if where.startswith("package://"):
        return PackageStorage(where.removeprefix("package://").rstrip("/"))
    if "://" in where and not where.startswith("file://"):
        from zoo.storage.objects import ObjectStorage

        return ObjectStorage(where)
    try:
        folder = expand_home(where.removeprefix("file://"))
    except MoecastError as error:
        raise StorageError(str(error)) from error
    try:
        folder.lstat()
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        pass  # what is done with it says so
    except (OSError, ValueError) as error:  # too long, or with characters that no name has
        raise StorageError(f"{where!r:.200} is not a folder or an address") from error
    return FolderStorage(folder)
