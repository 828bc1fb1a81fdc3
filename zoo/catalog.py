"""A zoo as static files in a storage: its index and its entries, read and changed."""

import logging
import re
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from pydantic import ValidationError

from predictors.errors import unknown
from predictors.records import explain_validation_error
from predictors.terminal import escape_controls
from zoo.card import FIGURE, FIGURES, StoredCard, figure_path, write_front_page
from zoo.conflicts import retry_conflicts
from zoo.digest import HEX64, check_digest, hash_bytes
from zoo.entry import CARD, ZooEntry
from zoo.errors import DamagedError, UnreachableError, ZooError
from zoo.index import (
    BLOBS,
    INDEX,
    LATEST,
    MAX_INDEX_BYTES,
    EntryListing,
    EntryReference,
    EntryVersion,
    ZooIndex,
    blob_path,
)
from zoo.locations import open_zoo_storage
from zoo.manifest import MAX_MANIFEST_BYTES, EntryManifest, FileRecord, parse_manifest
from zoo.signing import index_signature_path, sign_index
from zoo.storage import FolderStorage, Storage, WritableStorage

log = logging.getLogger(__name__)

MANIFEST_START = b'{\n  "format_version":'
"""The first bytes of a manifest in canonical form."""


@dataclass(frozen=True)
class Zoo:
    """The entries of one storage."""

    storage: Storage

    @classmethod
    def at(cls, where: str) -> "Zoo":
        """Returns the zoo at a folder, an address or `builtin`.

        Example:
            >>> zoo = Zoo.at("builtin")
            >>> {name: entry.manifest.metrics for name, entry in zoo.entries().items()}
        """
        return cls(open_zoo_storage(where))

    def entries(self) -> dict[str, ZooEntry]:
        """Opens the latest version of every entry, by name; ZooError if this is no zoo."""
        index = self.read_index(required=True)
        return {name: self.open(EntryReference(name), index) for name in index.entries}

    def read_index_bytes(self) -> bytes | None:
        """Reads `index.json`; None if there is none."""
        try:
            return self.storage.read(INDEX, limit=MAX_INDEX_BYTES)
        except (FileNotFoundError, NotADirectoryError):
            return None

    def parse_index(self, data: bytes | None, *, required: bool = False) -> ZooIndex:
        """Parses `index.json`; DamagedError if the data is not an index.

        Without data, returns an empty index, or raises ZooError if one is required.
        """
        if data is None:
            if required:
                raise ZooError(f"{self.storage.address} is not a zoo: it has no {INDEX}")
            return ZooIndex()
        try:
            return ZooIndex.model_validate_json(data)
        except ValidationError as error:
            address = self.storage.address
            hint = "ask its owner to publish it again"
            if isinstance(self.storage, FolderStorage):
                hint = f"moecast zoo index {address} makes it anew from the entries there"
            reason = explain_validation_error(error)
            raise DamagedError(f"{address}/{INDEX} is not an index: {reason}; {hint}") from error

    def read_index(self, *, required: bool = False) -> ZooIndex:
        """Reads and parses `index.json`; raises as `parse_index`, and UnreachableError."""
        return self.parse_index(self.read_index_bytes(), required=required)

    def open(self, reference: EntryReference, index: ZooIndex | None = None) -> ZooEntry:
        """Opens an entry, its manifest checked against the digest in the index."""
        index = self.read_index() if index is None else index
        digest = index.resolve(reference)
        version = index.version(reference.name, digest)
        return self.open_digest(digest, name=reference.name, version=version)

    def open_digest(
        self, digest: str, *, name: str, version: EntryVersion | None = None
    ) -> ZooEntry:
        manifest, _ = self.read_manifest(digest, name=name)
        signed = None if version is None else version.signature

        def fetch(path: str, limit: int) -> bytes:
            return self.storage.read(blob_path(manifest.files[path].sha256), limit=limit)

        def read_signature() -> bytes | None:
            if signed is None:
                return None
            what = f"the signature of {name} in {self.storage.address}"
            data = self._read_blob(signed.sha256, signed.size, what)
            return check_digest(data, sha256=signed.sha256, size=signed.size, what=what)

        return ZooEntry(manifest, self.storage.address, fetch, read_signature)

    def read_manifest(self, digest: str, *, name: str) -> tuple[EntryManifest, bytes]:
        """Reads a manifest by its digest, checked before it is parsed.

        Raises DamagedError if it is missing, has another digest, or is that of another entry.
        """
        what = f"the manifest of {name} in {self.storage.address}"
        data = self._read_blob(digest, MAX_MANIFEST_BYTES, what)
        check_digest(data, sha256=digest, size=None, what=what)
        manifest = parse_manifest(data, what=what)
        if manifest.name != name:
            raise DamagedError(f"{what} is that of {manifest.name!r}: the index is wrong")
        return manifest, data

    def _read_blob(self, digest: str, limit: int, what: str) -> bytes:
        """Reads a blob, unchecked; DamagedError if it is missing."""
        try:
            return self.storage.read(blob_path(digest), limit=limit)
        except FileNotFoundError as error:
            raise DamagedError(f"{what} is missing; pull the entry again") from error


@dataclass(frozen=True)
class AliasMove:
    """The version that an alias names, and the one that it named before, if any."""

    entry: ZooEntry
    earlier: ZooEntry | None


@dataclass(frozen=True)
class WritableZoo(Zoo):
    """A zoo that can be changed. The index is written last, in one step."""

    storage: WritableStorage
    key: Path | None = None
    """Private key (PEM) that signs the index; a signed index cannot be changed without one."""

    def add(self, entry: ZooEntry, *, replace: bool = False, alias: str | None = None) -> str:
        """Copies an entry, every byte checked, then lists it in the index; returns its digest.

        Interrupted at any point, the index lists complete entries only; unreferenced blobs are
        harmless and are reused by the next attempt. `replace` removes the entry's earlier versions
        and the blobs that nothing references any more.
        """
        manifest = entry.manifest
        files = {
            blob_path(record.sha256): entry.read(path) for path, record in manifest.files.items()
        }
        files[blob_path(manifest.digest)] = manifest.to_bytes()
        signature = entry.read_signature()
        if signature is not None:
            files[blob_path(hash_bytes(signature))] = signature
        self.register(manifest, signature=signature, files=files, replace=replace, alias=alias)
        return manifest.digest

    def register(
        self,
        manifest: EntryManifest,
        *,
        signature: bytes | None = None,
        files: Mapping[str, bytes] | None = None,
        replace: bool = False,
        alias: str | None = None,
    ) -> None:
        """Writes the files that are missing, then lists the entry in the index."""
        signed = None
        if signature is not None:
            signed = FileRecord(sha256=hash_bytes(signature), size=len(signature))

        def list_version(index: ZooIndex) -> dict[str, EntryListing]:
            known = index.entries.get(manifest.name)
            versions = {} if known is None or replace else known.versions
            aliases = {} if known is None or replace else known.aliases
            version = EntryVersion(created=manifest.created, size=manifest.size, signature=signed)
            listing = EntryListing(
                latest=manifest.digest,
                versions={**versions, manifest.digest: version},
                aliases=aliases if alias is None else {**aliases, alias: manifest.digest},
            )
            return {**index.entries, manifest.name: listing}

        self._update_index(list_version, files or {}, prune=replace)

    def move_alias(
        self,
        reference: EntryReference,
        alias: str,
        *,
        check: Callable[[ZooEntry, ZooEntry | None], None],
    ) -> AliasMove:
        """Makes an alias name the version that a reference means.

        `check` is called with that version and with the one that the alias names now, or None, and
        raises to refuse. Nobody can change the index in between: folders are locked, object stores
        with conditional writes make the second of two check again, the Hub refuses it.
        """
        moves: list[AliasMove] = []

        def point_alias(index: ZooIndex) -> dict[str, EntryListing]:
            if reference.name not in index.entries:
                raise ZooError(
                    f"{unknown('zoo entry', reference.name, index.entries)} in "
                    f"{self.storage.address}. moecast zoo push and pull add entries to yours; "
                    "zoo=ADDRESS names another"
                )
            digest = index.resolve(reference)
            listing = index.entries[reference.name]
            earlier = listing.aliases.get(alias)
            entry = self.open(EntryReference(reference.name, digest), index)
            now = None
            if earlier is not None:
                now = self.open(EntryReference(reference.name, earlier), index)
            check(entry, now)
            moves[:] = [AliasMove(entry, now)]
            aliases = {**listing.aliases, alias: digest}
            changed = listing.model_copy(update={"aliases": aliases})
            return {**index.entries, reference.name: changed}

        self._update_index(point_alias, {})
        return moves[0]

    def remove(self, reference: EntryReference) -> list[str]:
        """Removes an entry, or one version of it, from the index; returns the digests.

        The blobs stay until `prune`.
        """
        removed: list[str] = []

        def unlist_versions(index: ZooIndex) -> dict[str, EntryListing]:
            digest = index.resolve(reference)
            listing = index.entries[reference.name]
            entries = dict(index.entries)
            removed[:] = list(listing.versions) if reference.version == LATEST else [digest]
            kept = {
                digest: version
                for digest, version in listing.versions.items()
                if digest not in removed
            }
            del entries[reference.name]
            if kept:
                entries[reference.name] = EntryListing(
                    latest=find_newest(kept) if listing.latest in removed else listing.latest,
                    versions=kept,
                    aliases={
                        alias: digest
                        for alias, digest in listing.aliases.items()
                        if digest not in removed
                    },
                )
            return entries

        self._update_index(unlist_versions, {})
        return removed

    def prune(self) -> list[str]:
        """Removes the blobs that no listed entry references; returns their digests.

        Waits for pulls to end: until then, no index lists what they have downloaded. Of an entry
        whose manifest is damaged, the files are unknown and therefore removed.
        """

        def remove_unreferenced() -> list[str]:
            with self.storage.removing_blobs(), self.storage.exclusive():
                index = self.read_index()
                removed = self._unreferenced_blobs(index)
                if removed:
                    self._publish({}, index, removed)
            return removed

        return retry_conflicts(remove_unreferenced)

    def rebuild_index(self) -> ZooIndex:
        """Writes the index anew from the manifests among the blobs.

        The version that was made last is each entry's latest. Aliases, signatures and the date of
        expiry are lost, and the serial too unless it can be read in the damaged index.
        """
        with self.storage.exclusive():
            match = re.search(rb'"serial": *([0-9]{1,9})\b', self.read_index_bytes() or b"")
            index = ZooIndex(serial=int(match[1]) + 1 if match else 1, entries=self._find_entries())
            self._publish({}, index, [])
        return index

    def _find_entries(self) -> dict[str, EntryListing]:
        """Returns the listings of all intact manifests among the blobs, by name."""
        versions: dict[str, dict[str, EntryVersion]] = defaultdict(dict)
        for digest in self.storage.names(BLOBS):
            if not HEX64.fullmatch(digest):
                continue
            try:
                data = self.storage.read(blob_path(digest), limit=MAX_MANIFEST_BYTES)
            except ZooError as error:  # a link, or no plain file
                log.warning("%s", escape_controls(str(error)))
                continue
            if not data.startswith(MANIFEST_START) or hash_bytes(data) != digest:
                continue
            manifest = parse_manifest(data, what=digest)
            versions[manifest.name][digest] = EntryVersion(
                created=manifest.created, size=manifest.size
            )
        return {
            name: EntryListing(
                latest=max(made, key=lambda digest: made[digest].created), versions=made
            )
            for name, made in sorted(versions.items())
        }

    def renew_index(self, *, expires_days: float | None) -> ZooIndex:
        """Writes the index again with a higher serial and another date of expiry, or none."""
        expires = None
        if expires_days is not None:
            expires = datetime.now(UTC).replace(microsecond=0) + timedelta(days=expires_days)

        def renew() -> ZooIndex:
            with self.storage.exclusive():
                index = self.read_index()
                renewed = index.model_copy(update={"serial": index.serial + 1, "expires": expires})
                self._publish({}, renewed, [])
            return renewed

        return retry_conflicts(renew)

    def _update_index(
        self,
        change: Callable[[ZooIndex], dict[str, EntryListing]],
        files: Mapping[str, bytes],
        *,
        prune: bool = False,
    ) -> None:
        """Publishes the index with the listings that `change` makes of those that it has.

        `change` is called again with the newer index if another publisher was faster.
        """

        def update() -> None:
            # Two writers would lose one's listing; blobs need no lock, equal names are equal bytes.
            blobs = self.storage.removing_blobs() if prune else nullcontext()
            with blobs, self.storage.exclusive():
                index = self.read_index()
                entries = dict(sorted(change(index).items()))
                missing = {path: data for path, data in files.items() if not self._has(path, data)}
                changed = index.model_copy(update={"serial": index.serial + 1, "entries": entries})
                removed = self._unreferenced_blobs(changed, added=files) if prune else []
                if entries != index.entries or missing or removed:
                    self._publish(missing, changed if entries != index.entries else index, removed)

        retry_conflicts(update)

    def _publish(self, files: Mapping[str, bytes], index: ZooIndex, removed: list[str]) -> None:
        paths = [blob_path(digest) for digest in removed]
        written = dict(files)
        data, earlier = index.to_bytes(), self.read_index_bytes()
        if earlier is not None and earlier != data:
            signature = index_signature_path(earlier)
            if self.storage.has(signature):
                if self.key is None:
                    raise ZooError(
                        f"the index of {self.storage.address} is signed: give key=KEY.pem, the "
                        "private key of its owner, or readers would refuse the changed one"
                    )
                paths.append(signature)
        if self.key is not None:
            written[index_signature_path(data)] = sign_index(data, key=self.key)
        if self.storage.has_front_page:
            cards = self._read_cards(files, index)
            figures = {figure_path(name): card.png for name, card in cards.items() if card.png}
            written |= {CARD: write_front_page(cards), **figures}
            shown = {f"{FIGURES}/{name}" for name in self.storage.names(FIGURES)}
            paths += sorted(shown - figures.keys())
        self.storage.publish(written, index=(INDEX, data), removed=paths)

    def _read_cards(self, added: Mapping[str, bytes], index: ZooIndex) -> dict[str, StoredCard]:
        """Returns the card of every entry's latest version; `added` blobs are not stored yet."""
        cards = {}
        for name, listing in index.entries.items():
            data = added.get(blob_path(listing.latest))
            try:
                if data is None:
                    data = self.read_manifest(listing.latest, name=name)[1]
                records = parse_manifest(data, what=name).files
                text, png = (
                    self._read_added(records.get(path), added, f"{path} of {name}")
                    for path in (CARD, FIGURE)
                )
                cards[name] = StoredCard(text or b"", png)
            except DamagedError as error:
                log.warning("%s", escape_controls(str(error)))
                cards[name] = StoredCard()
        return cards

    def _read_added(
        self, record: FileRecord | None, added: Mapping[str, bytes], what: str
    ) -> bytes | None:
        """Returns a file's bytes, stored or to be stored; None if the entry does not have it."""
        if record is None:
            return None
        path = blob_path(record.sha256)
        if path in added:
            return added[path]
        what = f"{what} in {self.storage.address}"
        data = self._read_blob(record.sha256, record.size, what)
        return check_digest(data, sha256=record.sha256, size=record.size, what=what)

    def _has(self, path: str, data: bytes) -> bool:
        """Whether the same bytes are stored: a damaged blob is written again."""
        if not self.storage.has(path):
            return False
        return self.storage.is_remote or self.storage.read(path, limit=len(data)) == data

    def _unreferenced_blobs(
        self, index: ZooIndex, *, added: Mapping[str, bytes] | None = None
    ) -> list[str]:
        referenced: set[str] = set()
        for name, listing in index.entries.items():
            for digest, version in listing.versions.items():
                referenced.add(digest)
                if version.signature is not None:
                    referenced.add(version.signature.sha256)
                if added is None or blob_path(digest) not in added:
                    try:
                        manifest, _ = self.read_manifest(digest, name=name)
                    except UnreachableError:
                        raise
                    except ZooError as error:
                        log.warning("%s", escape_controls(str(error)))
                        continue
                    referenced |= {record.sha256 for record in manifest.files.values()}
        referenced |= {path.rpartition("/")[2] for path in added or ()}
        return [name for name in self.storage.names(BLOBS) if name not in referenced]


def find_newest(versions: Mapping[str, EntryVersion]) -> str:
    """Returns the digest of the version that was made last."""
    return max(versions, key=lambda digest: versions[digest].created)
