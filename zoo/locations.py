"""The zoos that are known without a network: the built-in one, the cache, and MOECAST_ZOO."""

import os
from pathlib import Path

from predictors.files import cache_folder
from zoo.errors import StorageError
from zoo.storage import FolderStorage, Storage, WritableStorage, open_storage

BUILTIN = Path(__file__).resolve().parent / "builtin"
ZOOS = "MOECAST_ZOO"


def builtin_storage() -> FolderStorage:
    """Returns the zoo that ships inside the package."""
    return FolderStorage(BUILTIN)


def cache_storage() -> FolderStorage:
    """Returns the zoo of pulled entries: below MOECAST_CACHE, else the user's cache folder."""
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
