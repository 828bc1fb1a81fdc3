"""From another zoo into this user's: each blob once, in parallel, from where it was cut short."""

import hashlib
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock

from predictors.files import sync_folder
from zoo.catalogue import Zoo
from zoo.digest import check
from zoo.entry import Entry
from zoo.errors import DamagedError, UnreachableError
from zoo.index import BLOBS, Reference, Version, blob
from zoo.manifest import MAX_MANIFEST_BYTES, parse_manifest
from zoo.storage import FolderStorage, Storage
from zoo.writing import WritableZoo

PARTIAL, LOCKS = "partial", "locks"
PARALLEL = 8
"""Blobs at a time: a zoo's files are small, and most of the time is the server's answer."""

Progress = Callable[[int], None]
"""Told how many bytes more have arrived."""


@dataclass(frozen=True)
class Cache:
    """The folder of what was pulled. Several processes may pull into it at once."""

    storage: FolderStorage

    @property
    def zoo(self) -> WritableZoo:
        """Its entries."""
        return WritableZoo(self.storage)

    def has(self, digest: str, size: int | None) -> bool:
        """Whether the blob is there; its bytes are hashed whenever they are read."""
        path = self.storage.folder / blob(digest)
        return path.is_file() and (size is None or path.stat().st_size == size)

    def fetch(
        self, source: Storage, digest: str, *, size: int, what: str, progress: Progress
    ) -> None:
        """Brings one blob, unless it is there. Whoever else wants it waits, and finds it.

        Raises:
            DamagedError: other bytes came, or none; nothing of them is kept.
            UnreachableError: as `Storage.stream`; what has arrived is kept for the next try.
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
            partial.replace(folder / blob(digest))
            sync_folder(folder / BLOBS)
            sync_folder(folder / PARTIAL)


def _download(
    source: Storage, partial: Path, digest: str, *, size: int, what: str, progress: Progress
) -> None:
    """Completes the partial file; it is removed when its bytes are not the promised ones."""
    have = partial.stat().st_size if partial.exists() else 0
    if have > size:
        partial.unlink()
        have = 0
    try:
        with source.stream(blob(digest), offset=have) as stream, partial.open("ab") as file:
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
            f"{what}: {arrived:,} of {size:,} bytes came from {source.address}; ask again, and it "
            "goes on from there"
        )
    with partial.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != digest or arrived != size:
        partial.unlink()
        raise DamagedError(
            f"{what} in {source.address} is damaged: sha256 {found[:12]}..., {arrived:,} bytes, "
            f"where {digest[:12]}..., {size:,} bytes, were promised. Nothing of it was read"
        )


def pull(
    source: Zoo,
    name: str,
    digest: str,
    version: Version,
    *,
    cache: Cache,
    checked: Callable[[Entry], None] | None = None,
    progress: Callable[[int], Progress] | None = None,
) -> Entry:
    """The entry with this digest, from the cache once all of it is there.

    Args:
        checked: told of the complete entry before it gets its name; an error that it raises
            leaves it unnamed.
        progress: given the bytes of all files; the function it gives is told what arrives.
    """
    reference = Reference(name, digest)
    if complete(cache, reference, version):
        entry = cache.zoo.open(reference)
        if checked is not None:
            checked(entry)
        if cache.zoo.resolve(Reference(name)) != digest:
            cache.zoo.name(entry.manifest, signature=entry.signature())
        return entry
    what = f"the manifest of {name} in {source.storage.address}"
    data = source.fetch(digest, MAX_MANIFEST_BYTES, what)
    manifest = parse_manifest(check(data, sha256=digest, size=None, what=what), what=what)
    wanted = {record.sha256: (record.size, path) for path, record in manifest.files.items()}
    wanted[digest] = (len(data), "manifest.json")
    if version.signature is not None:
        wanted[version.signature.sha256] = (version.signature.size, "signature.json")
    told: Progress = (lambda _: None) if progress is None else progress(_total(wanted))
    with ThreadPoolExecutor(min(PARALLEL, len(wanted))) as pool:
        jobs = [
            pool.submit(
                cache.fetch, source.storage, one, size=size, what=f"{path} of {name}", progress=told
            )
            for one, (size, path) in wanted.items()
        ]
        try:
            for job in jobs:
                job.result()
        finally:
            for job in jobs:
                job.cancel()
    entry = cache.zoo.open_digest(digest, name=name, version=version)
    # What lay in the cache already was not hashed on its way here, and no graph was looked at.
    entry.verify()
    if checked is not None:
        checked(entry)
    cache.zoo.name(manifest, signature=entry.signature())
    return entry


def _total(wanted: Mapping[str, tuple[int, str]]) -> int:
    return sum(size for size, _ in wanted.values())


def complete(cache: Cache, reference: Reference, version: Version) -> bool:
    """Whether the cache names the entry and has all of its files, with their sizes."""
    if len(reference.matches(cache.zoo.index())) != 1:
        return False
    known, listed = cache.zoo.version(reference)
    if listed.signature != version.signature or not cache.has(known, None):
        return False
    files = cache.zoo.open_digest(known, name=reference.name).manifest.files
    return all(cache.has(record.sha256, record.size) for record in files.values())
