"""Pulls entries into the user's zoo: each blob once, several at a time, hashed as they arrive."""

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from predictors.files import write_atomic
from predictors.table import escape_controls
from zoo.catalog import WritableZoo, Zoo
from zoo.entry import SIGNATURE, ZooEntry
from zoo.errors import ZooError
from zoo.index import EntryReference, ZooIndex, blob_path, is_alias
from zoo.manifest import FileRecord
from zoo.signing import check_signature, required_key
from zoo.storage import builtin_storage, cache_storage
from zoo.storage.folder import FolderStorage

PARALLEL = 8
"""Downloads at a time: a zoo's files are small, and most of the time is the server's latency."""


def has_blob(cache: FolderStorage, digest: str) -> bool:
    """Whether the blob is there, every byte of it intact."""
    try:
        return cache.sha256(blob_path(digest)) == digest
    except (FileNotFoundError, NotADirectoryError, ZooError):
        return False


def pull_reference(
    source: Zoo,
    reference: EntryReference,
    index: ZooIndex | None = None,
    *,
    require_signature: Path | None = None,
    keeps_names: bool = False,
) -> ZooEntry:
    """Returns an entry from the cache, after what is missing of it was downloaded.

    Of several processes, one pulls at a time. The cache lists the complete entry, an alias too.

    Args:
        source: the zoo to pull from.
        reference: the version.
        index: the source's, if it was read before.
        require_signature: public key with which the entry must be signed; by default that of
            MOECAST_REQUIRE_SIGNATURE, except for the built-in zoo, which came with the package.
        keeps_names: the entry's latest version in the cache, and its aliases there, stay: to use a
            version once does not decide which one a name means.
    """
    key = require_signature or required_key()
    if index is None:
        index = source.read_index(required=True, key=key)
    name, digest, cache = reference.name, index.resolve(reference), cache_storage()
    version, zoo = index.entries[name].versions[digest], WritableZoo(cache)
    if not has_blob(cache, digest):
        address = escape_controls(source.storage.address)
        sys.stderr.write(f"pulling {name}@{digest[:12]} from {address}\n")
    with cache.changing_blobs():
        zoo.read_index()  # one that cannot be changed is found out first
        added = {}
        if not has_blob(cache, digest):
            data = source.open_digest(digest, name=name).manifest.to_bytes()
            added[blob_path(digest)] = data
        entry = zoo.open_digest(digest, name=name, version=version, added=added)
        blobs = {record.sha256: (record, path) for path, record in entry.manifest.files.items()}
        if version.signature is not None:
            blobs[version.signature.sha256] = (version.signature, SIGNATURE)
        missing = [blob for sha256, blob in blobs.items() if not has_blob(cache, sha256)]
        needed = sum(record.size for record, _ in missing)
        advice = "Free some, or set MOECAST_CACHE to a folder on another disk"
        cache.require_space(needed, name, advice=advice)
        for path, data in added.items():
            write_atomic(cache.folder / path, data)

        def fetch(record: FileRecord, path: str) -> None:
            blob, what = blob_path(record.sha256), f"{path} of {name}"
            cache.fetch(source.storage, blob, record.sha256, record.size, what=what)

        with ThreadPoolExecutor(PARALLEL) as pool:
            # The first failure cancels those that have not begun.
            list(pool.map(lambda blob: fetch(*blob), missing))
        entry.verify()  # also the graphs
        if key is not None and (require_signature or source.storage != builtin_storage()):
            check_signature(entry, key=key)
        alias = reference.version if is_alias(reference.version) else None
        zoo.register(
            entry.manifest,
            signature=entry.read_signature(),
            alias=alias,
            keeps_names=keeps_names,
        )
    return entry
