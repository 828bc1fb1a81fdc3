"""A trace in an object store, copied to a disk of this machine: columns are mapped from there.

A copy is named by the trace's digest, and each file is hashed while it comes: one that was altered
on the way, or in the store, is refused. What was copied before is not copied again.
"""

import os
from pathlib import Path

import platformdirs

from collect.errors import DiskSpaceError, TraceError
from collect.traces.manifest import MANIFEST, FileRecord, TraceManifest, to_json
from collect.traces.places import FolderPlace, Place

CACHE = "MOECAST_CACHE"


def copies_folder() -> Path:
    """Below MOECAST_CACHE, else the user's cache folder."""
    named = os.environ.get(CACHE)
    return (Path(named) if named else platformdirs.user_cache_path("moecast")) / "traces"


def local_copy(place: Place, manifest: TraceManifest) -> Path:
    """The folder with the trace's files, all of them checked.

    Raises:
        TraceError: a file is missing there, or is not what `trace.json` promises.
        DiskSpaceError: no room for it here.
    """
    folder = copies_folder() / manifest.digest[:32]
    folder.mkdir(parents=True, exist_ok=True)
    here = FolderPlace(folder)
    here.tidy(everything=False)
    missing = [one for one in manifest.files() if not _is_whole(here, one)]
    needed, free = sum(one.size for one in missing), here.free_bytes()
    if free is not None and free < needed:
        raise DiskSpaceError(
            f"{folder}: a copy of {place.where} needs {needed:,} bytes, {free:,} are free. Set "
            f"{CACHE} to a folder on a larger disk"
        )
    for record in missing:
        _copy(place, here, record)
    here.write(MANIFEST, to_json(manifest))
    return folder


def _is_whole(here: FolderPlace, record: FileRecord) -> bool:
    return here.size(record.name) == record.size and here.sha256(record.name) == record.sha256


def _copy(place: Place, here: FolderPlace, record: FileRecord) -> None:
    with here.sink(record.name) as file:
        temporary = Path(file.name)
        try:
            place.fetch(record.name, temporary)
        except FileNotFoundError:
            raise TraceError(
                f"{place.where}/{record.name} is missing: run the same `python -m collect` again: "
                "it records what is missing"
            ) from None
        found = FolderPlace(temporary.parent).sha256(temporary.name)
        if found != record.sha256:
            raise TraceError(
                f"{place.where}/{record.name} is damaged: sha256 {found[:12]}... where "
                f"{record.sha256[:12]}... was written. Delete it there and run the same "
                "`python -m collect` again: it records what is missing"
            )
