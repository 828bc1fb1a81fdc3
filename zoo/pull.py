"""Pulls entries into the user's zoo: each blob once, in parallel, interrupted downloads resumed."""

import hashlib
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock

from predictors.files import sync_folder
from zoo.catalog import WritableZoo, Zoo
from zoo.entry import MANIFEST, SIGNATURE, ZooEntry
from zoo.errors import DamagedError, UnreachableError
from zoo.index import BLOBS, EntryReference, EntryVersion, ZooIndex, blob_path
from zoo.storage import FolderStorage, Storage

PARTIAL, LOCKS = "partial", "locks"
PARALLEL = 8
"""Downloads at a time: a zoo's files are small, and most of the time is the server's latency."""

ReportProgress = Callable[[int], None]
"""Is called with the number of bytes that have arrived since the last call."""


@dataclass(frozen=True)
class PullCache:
    """The folder of pulled entries. Several processes may pull into it at once."""

    storage: FolderStorage

    @property
    def zoo(self) -> WritableZoo:
        return WritableZoo(self.storage)

    def has(self, digest: str, size: int | None) -> bool:
        """Whether the blob is there; its bytes are hashed whenever they are read."""
        path = self.storage.folder / blob_path(digest)
        return path.is_file() and (size is None or path.stat().st_size == size)

    def fetch(
        self, source: Storage, digest: str, *, size: int, what: str, progress: ReportProgress
    ) -> None:
        """Downloads a blob unless it is there; a process that wants the same blob waits for it.

        Raises:
            DamagedError: the blob is missing in the source or has another digest; its bytes are
                removed.
            UnreachableError: the download was interrupted; what has arrived is kept, and the next
                attempt resumes it.
        """
        folder = self.storage.folder
        for name in (PARTIAL, LOCKS, BLOBS):
            (folder / name).mkdir(parents=True, exist_ok=True)
        with FileLock(folder / LOCKS / digest):
            if self.has(digest, size):
                progress(size)
                return
            partial = folder / PARTIAL / digest
            _download(source, partial, digest, size=size, what=what, progress=progress)
            partial.chmod(0o644)
            partial.replace(folder / blob_path(digest))
            sync_folder(folder / BLOBS)
            sync_folder(folder / PARTIAL)


def _download(
    source: Storage, partial: Path, digest: str, *, size: int, what: str, progress: ReportProgress
) -> None:
    """Completes the partial file; removes it if its digest is wrong."""
    present = partial.stat().st_size if partial.exists() else 0
    if present > size:
        partial.unlink()
        present = 0
    try:
        with source.stream(blob_path(digest), offset=present) as stream, partial.open("ab") as file:
            file.truncate(stream.offset)
            file.seek(stream.offset)
            progress(stream.offset)
            arrived = stream.offset
            for chunk in stream.chunks:
                file.write(chunk)
                progress(len(chunk))
                arrived += len(chunk)
                if arrived > size:
                    break  # an endless answer must not fill the disk
            file.flush()
            os.fsync(file.fileno())
    except FileNotFoundError as error:
        raise DamagedError(f"{what} is missing in {source.address}") from error
    if arrived < size:
        raise UnreachableError(
            f"{what}: {arrived:,} of {size:,} bytes came from {source.address}; pull again to "
            "resume"
        )
    with partial.open("rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    if sha256 != digest or arrived != size:
        partial.unlink()
        raise DamagedError(
            f"{what} in {source.address} is damaged: got {arrived:,} bytes with sha256 "
            f"{sha256[:12]}..., expected {size:,} with {digest[:12]}.... Nothing of it was read"
        )


def pull_entry(
    source: Zoo,
    name: str,
    digest: str,
    version: EntryVersion,
    *,
    cache: PullCache,
    check: Callable[[ZooEntry], None] | None = None,
    progress: Callable[[int], ReportProgress] | None = None,
) -> ZooEntry:
    """Returns the entry with this digest from the cache, after all of it was downloaded.

    Args:
        source: the zoo to pull from.
        version: the entry's record in the source's index.
        check: is called with the complete entry before the index lists it; if it raises, the entry
            stays unlisted.
        progress: is called with the total size; returns the function that counts arrived bytes.
    """
    index = cache.zoo.read_index()
    entry = open_complete(cache, index, EntryReference(name, digest), version)
    if entry is not None:
        if check is not None:
            check(entry)
        if index.resolve(EntryReference(name)) != digest:
            cache.zoo.register(entry.manifest, signature=entry.read_signature())
        return entry
    manifest, data = source.read_manifest(digest, name=name)
    blobs = {record.sha256: (record.size, path) for path, record in manifest.files.items()}
    blobs[digest] = (len(data), MANIFEST)
    if version.signature is not None:
        blobs[version.signature.sha256] = (version.signature.size, SIGNATURE)
    total = sum(size for size, _ in blobs.values())
    report: ReportProgress = (lambda _: None) if progress is None else progress(total)
    with ThreadPoolExecutor(min(PARALLEL, len(blobs))) as pool:
        downloads = [
            pool.submit(
                cache.fetch,
                source.storage,
                blob,
                size=size,
                what=f"{path} of {name}",
                progress=report,
            )
            for blob, (size, path) in blobs.items()
        ]
        try:
            for download in downloads:
                download.result()
        finally:
            for download in downloads:
                download.cancel()
    entry = cache.zoo.open_digest(digest, name=name, version=version)
    # Blobs that were in the cache before were not hashed now, and no graph was checked.
    entry.verify()
    if check is not None:
        check(entry)
    cache.zoo.register(manifest, signature=entry.read_signature())
    return entry


def open_complete(
    cache: PullCache, index: ZooIndex, reference: EntryReference, version: EntryVersion
) -> ZooEntry | None:
    """Opens the entry if the cache's index lists it and all files are there with their sizes."""
    if not index.has(reference):
        return None
    digest = index.resolve(reference)
    listed = index.version(reference.name, digest)
    if listed.signature != version.signature or not cache.has(digest, None):
        return None
    entry = cache.zoo.open_digest(digest, name=reference.name, version=listed)
    records = entry.manifest.files.values()
    return entry if all(cache.has(record.sha256, record.size) for record in records) else None
