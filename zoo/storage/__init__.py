"""Storage of a zoo's or a trace's files: a folder, a web server, an object store, the Hub.

Zoos that are known without a network are the built-in one and the cache; MOECAST_ZOO names others.
"""

import os
from pathlib import Path

from predictors.errors import MoecastError
from predictors.files import cache_folder, expand_home
from zoo.errors import StorageError
from zoo.storage.base import Storage, WritableStorage
from zoo.storage.folder import FolderStorage

BUILTIN = Path(__file__).resolve().parents[1] / "builtin"
ZOOS = "MOECAST_ZOO"


def open_storage(where: str | Path | Storage) -> Storage:
    """Returns the storage at a folder or an address, or as it is given; nothing is read yet.

    Raises ZooError for an hf:// address that names no repository and for `~USER` without a home.
    """
    if isinstance(where, Storage):
        return where
    if isinstance(where, Path):
        return FolderStorage(where)
    if where.startswith(("http://", "https://")):
        from zoo.storage.remote import HttpStorage

        return HttpStorage(where)
    if where.startswith("hf://"):
        from zoo.storage.hub import open_hub_storage

        return open_hub_storage(where)
    if "://" in where and not where.startswith("file://"):
        from zoo.storage.remote import ObjectStorage

        return ObjectStorage(where)
    try:
        folder = expand_home(where.removeprefix("file://"))
        folder.lstat()
    except MoecastError as error:
        raise StorageError(str(error)) from error
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        pass  # what is done with it says so
    except (OSError, ValueError) as error:  # too long, or with characters that no name has
        raise StorageError(f"{where!r:.200} is not a folder or an address") from error
    return FolderStorage(folder)


def builtin_storage() -> FolderStorage:
    """Returns the zoo that ships inside the package."""
    return FolderStorage(BUILTIN)


def cache_storage() -> FolderStorage:
    """Returns the zoo of pulled entries: below MOECAST_CACHE, else the user's cache folder.

    Raises:
        MoecastError: the user has no home folder.
    """
    return FolderStorage(cache_folder("zoo"))


def configured_storages(zoos: str | None = None) -> list[Storage]:
    """Opens the zoos of a comma-separated list, in its order; default: those of MOECAST_ZOO."""
    listed = os.environ.get(ZOOS, "") if zoos is None else zoos
    return [open_zoo_storage(zoo.strip()) for zoo in listed.split(",") if zoo.strip()]


def open_zoo_storage(where: str) -> Storage:
    """Opens a zoo by `builtin`, a folder or an address; StorageError if it names no storage."""
    return builtin_storage() if where == "builtin" else open_storage(where)


def open_writable_storage(where: str) -> WritableStorage:
    """Opens a zoo to publish in; StorageError if the storage is read-only."""
    storage = open_zoo_storage(where)
    if not isinstance(storage, WritableStorage):
        raise StorageError(
            f"{where} is read-only; publish to a folder, s3://BUCKET/PATH or hf://OWNER/REPO"
        )
    return storage
