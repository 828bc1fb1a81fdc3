"""The storage of a trace: a folder, or an address that `zoo.storage` opens."""

from pathlib import Path

from collect.errors import TraceError
from zoo.storage import FileStorage, Storage, open_storage


def open_trace_storage(where: str | Path | Storage) -> Storage:
    """Returns the storage that a user named; a storage is returned as it is."""
    return open_storage(where) if isinstance(where, str | Path) else where


def open_writable_storage(where: str | Path | Storage) -> FileStorage:
    """Returns the storage that a trace is written to.

    Raises:
        TraceError: the storage is read-only, or has no operations on single files.
    """
    storage = open_trace_storage(where)
    if not isinstance(storage, FileStorage):
        raise TraceError(
            f"a trace cannot be written to {storage.address}; name a folder or s3://BUCKET/PATH"
        )
    return storage
