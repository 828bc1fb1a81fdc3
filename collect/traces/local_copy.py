"""The local copy of a trace that is not in a folder: its columns are memory-mapped from there.

The copy's folder is named by the trace's digest, and each file is hashed while it arrives: one that
was altered in the storage or on the way is refused. Files that are there already are kept.
"""

import hashlib
from pathlib import Path

from collect.errors import DiskSpaceError, TraceError
from collect.traces.manifest import MANIFEST, TraceFile, TraceManifest, to_json
from predictors.files import CACHE, cache_folder
from zoo.storage import FolderStorage, Storage


def copy_trace(source: Storage, manifest: TraceManifest) -> Path:
    """Copies the files that are missing here; returns the folder, all files of it checked.

    Raises:
        TraceError: a file is missing in the storage, or differs from its record in `trace.json`.
        DiskSpaceError: the disk of the cache folder is too small.
    """
    copy = FolderStorage(cache_folder("traces") / manifest.digest[:32])
    copy.folder.mkdir(parents=True, exist_ok=True)
    copy.remove_temporary(everything=False)
    missing = [record for record in manifest.files() if not _is_whole(copy, record)]
    needed, free = sum(record.size for record in missing), copy.free_bytes()
    if free is not None and free < needed:
        raise DiskSpaceError(
            f"{copy.folder}: a copy of {source.address} needs {needed:,} bytes, {free:,} are free. "
            f"Set {CACHE} to a folder on a larger disk"
        )
    for record in missing:
        _copy_file(source, copy, record)
    copy.write(MANIFEST, to_json(manifest))
    return copy.folder


def _is_whole(copy: FolderStorage, record: TraceFile) -> bool:
    return copy.size(record.name) == record.size and copy.sha256(record.name) == record.sha256


def _copy_file(source: Storage, copy: FolderStorage, record: TraceFile) -> None:
    path = f"{source.address}/{record.name}"
    digest = hashlib.sha256()
    with copy.open_new(record.name) as file:
        try:
            with source.stream(record.name) as stream:
                for chunk in stream.chunks:
                    digest.update(chunk)
                    file.write(chunk)
        except FileNotFoundError:
            raise TraceError(
                f"{path} is missing: run the same `python -m collect` again, it records what is "
                "missing"
            ) from None
        if digest.hexdigest() != record.sha256:
            raise TraceError(
                f"{path} is damaged: expected sha256 {record.sha256[:12]}..., got "
                f"{digest.hexdigest()[:12]}... Delete it there and run the same "
                "`python -m collect` again, it records what is missing"
            )
