"""Pulls entries into the user's zoo: each blob once, in parallel, interrupted downloads resumed."""

import errno
import hashlib
import logging
import os
import stat
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock

from predictors.errors import DiskFullError
from predictors.files import sync_folder, write_atomic
from predictors.terminal import escape_controls
from zoo.catalog import WritableZoo, Zoo
from zoo.entry import MANIFEST, SIGNATURE, ZooEntry
from zoo.errors import DamagedError, UnreachableError, ZooError
from zoo.index import BLOBS, EntryReference, EntryVersion, ZooIndex, blob_path
from zoo.origins import record_origin
from zoo.storage import FolderStorage, Storage

log = logging.getLogger(__name__)

PARTIAL, LOCKS = "partial", "locks"
LEAST_SECONDS, LEAST_BYTES_PER_SECOND = 60.0, 10_000
"""A download that is slower ends; the next pull resumes it."""
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

    def has(self, digest: str) -> bool:
        """Whether the blob is there, every byte of it intact."""
        try:
            return self.storage.sha256(blob_path(digest)) == digest
        except (FileNotFoundError, NotADirectoryError, ZooError):
            return False

    def read_index(self) -> ZooIndex:
        """Reads the cache's index; writes a damaged one anew, with a warning."""
        try:
            return self.zoo.read_index()
        except DamagedError as error:
            index = self.zoo.rebuild_index()
            log.warning(
                "%s. It was made anew and lists %d entries; signatures and aliases were lost: pull "
                "signed entries again",
                escape_controls(str(error)),
                len(index.entries),
            )
            return index

    def lock(self, digest: str) -> FileLock:
        """Returns the lock of a blob, which the one that downloads it holds."""
        folder = self.storage.folder
        for name in (PARTIAL, LOCKS, BLOBS):
            (folder / name).mkdir(parents=True, exist_ok=True)
        return FileLock(folder / LOCKS / digest)

    def keep(self, digest: str, data: bytes) -> None:
        """Writes a blob whose digest was checked; raises DiskFullError."""
        write_atomic(self.storage.folder / blob_path(digest), data)

    def fetch(
        self, source: Storage, digest: str, *, size: int, what: str, progress: ReportProgress
    ) -> None:
        """Downloads a blob unless it is there intact; another process that wants it waits.

        Raises:
            DamagedError: the blob is missing in the source or has another digest; its bytes are
                removed.
            UnreachableError: the download was interrupted; what has arrived is kept, and the next
                attempt resumes it.
        """
        folder = self.storage.folder
        with self.lock(digest):
            if self.has(digest):
                progress(size)
                return
            partial = folder / PARTIAL / digest
            _download(source, partial, digest, size=size, what=what, progress=progress)
            partial.chmod(0o644)
            partial.replace(folder / blob_path(digest))
            sync_folder(folder / BLOBS)
            sync_folder(folder / PARTIAL)


def _is_own_file(path: Path, size: int) -> bool:
    """Whether it is a plain file with one name that may be the beginning of a blob."""
    found = path.lstat()
    return stat.S_ISREG(found.st_mode) and found.st_nlink == 1 and found.st_size <= size


def _require_space(cache: PullCache, blobs: Mapping[str, tuple[int, str]], name: str) -> None:
    """Raises DiskFullError unless the blobs that are not in the cache fit on its disk."""
    missing = sum(size for digest, (size, _) in blobs.items() if not cache.has(digest))
    free = cache.storage.free_bytes()
    if missing and free is not None and free < missing:
        raise DiskFullError(
            f"{name} needs {missing:,} bytes in {cache.storage.address}, where {free:,} are free; "
            "free some space, or set MOECAST_CACHE to a folder on another disk"
        )


def _download(
    source: Storage, partial: Path, digest: str, *, size: int, what: str, progress: ReportProgress
) -> None:
    """Completes the partial file; removes it if its digest is wrong."""
    if partial.is_symlink() or (partial.exists() and not _is_own_file(partial, size)):
        partial.unlink()
    present = partial.stat().st_size if partial.exists() else 0
    # A link that appears meanwhile is an error, so that nothing outside the cache is written.
    flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK
    deadline = time.monotonic() + LEAST_SECONDS + size / LEAST_BYTES_PER_SECOND
    try:
        with (
            source.stream(blob_path(digest), offset=present) as stream,
            os.fdopen(os.open(partial, flags, 0o644), "ab") as file,
        ):
            file.truncate(stream.offset)
            file.seek(stream.offset)
            progress(stream.offset)
            arrived = stream.offset
            for chunk in stream.chunks:
                file.write(chunk)
                progress(len(chunk))
                arrived += len(chunk)
                if arrived > size or time.monotonic() > deadline:
                    break  # an endless answer must not fill the disk, nor take for ever
            file.flush()
            os.fsync(file.fileno())
    except FileNotFoundError as error:
        raise DamagedError(f"{what} is missing in {source.address}") from error
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise DiskFullError(
            f"{what}: the disk of {partial.parent} is full; free some space and pull again to "
            "resume, or set MOECAST_CACHE to a folder on another disk"
        ) from error
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
    alias: str | None = None,
) -> ZooEntry:
    """Returns the entry with this digest from the cache, after all of it was downloaded.

    Args:
        source: the zoo to pull from.
        version: the entry's record in the source's index.
        check: is called with the complete entry before the index lists it; if it raises, the entry
            stays unlisted.
        progress: is called with the total size; returns the function that counts arrived bytes.
        alias: the name by which the version was asked for; it names it in the cache too.
    """
    with cache.storage.keeping_blobs():
        entry = _complete_entry(source, name, digest, version, cache, check, progress, alias)
    record_origin(cache.storage, digest, source.storage)
    return entry


def _complete_entry(
    source: Zoo,
    name: str,
    digest: str,
    version: EntryVersion,
    cache: PullCache,
    check: Callable[[ZooEntry], None] | None,
    progress: Callable[[int], ReportProgress] | None,
    alias: str | None,
) -> ZooEntry:
    index = cache.read_index()
    entry = open_complete(cache, index, EntryReference(name, digest), version)
    if entry is not None:
        if check is not None:
            check(entry)
        is_listed = index.resolve(EntryReference(name)) == digest
        if not is_listed or (alias and index.entries[name].aliases.get(alias) != digest):
            cache.zoo.register(entry.manifest, signature=entry.read_signature(), alias=alias)
        return entry
    with cache.lock(digest):
        # Its digest is checked as it is read, so that it is requested once, by one process.
        is_cached = cache.has(digest)
        manifest, data = (cache.zoo if is_cached else source).read_manifest(digest, name=name)
        blobs = {record.sha256: (record.size, path) for path, record in manifest.files.items()}
        if version.signature is not None:
            blobs[version.signature.sha256] = (version.signature.size, SIGNATURE)
        _require_space(cache, {**blobs, digest: (len(data), MANIFEST)}, name)
        if not is_cached:
            cache.keep(digest, data)
    total = sum(size for size, _ in blobs.values())
    report: ReportProgress = (lambda _: None) if progress is None else progress(total)
    with ThreadPoolExecutor(PARALLEL) as pool:
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
    entry.verify()  # also the graphs
    if check is not None:
        check(entry)
    cache.zoo.register(manifest, signature=entry.read_signature(), alias=alias)
    return entry


def open_complete(
    cache: PullCache, index: ZooIndex, reference: EntryReference, version: EntryVersion
) -> ZooEntry | None:
    """Opens the entry if the cache's index lists it and all its files are there intact."""
    if not index.has(reference):
        return None
    digest = index.resolve(reference)
    listed = index.version(reference.name, digest)
    if listed.signature != version.signature:
        return None
    try:
        entry = cache.zoo.open_digest(digest, name=reference.name, version=listed)
        entry.verify()
        entry.read_signature()
    except ZooError:
        return None  # what is wrong is downloaded again, or refused again
    return entry
