"""A zoo as static files in a storage: its index and its entries, read and changed."""

import logging
import random
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

from predictors.errors import unknown
from predictors.table import escape_controls
from zoo.card import FIGURE, FIGURES, StoredCard, figure_path, write_front_page
from zoo.digest import hash_bytes, read_checked
from zoo.entry import CARD, ZooEntry
from zoo.errors import ConflictError, DamagedError, UnreachableError, ZooError
from zoo.index import (
    BLOBS,
    INDEX,
    MAX_INDEX_BYTES,
    SIGNATURES,
    EntryListing,
    EntryReference,
    EntryVersion,
    ZooIndex,
    blob_path,
)
from zoo.manifest import MAX_MANIFEST_BYTES, FileRecord, parse_manifest
from zoo.signing import check_index_signature, index_signature_path, require_owner, sign_index
from zoo.storage import builtin_storage, open_zoo_storage
from zoo.storage.base import Storage, WritableStorage

log = logging.getLogger(__name__)

Entries = dict[str, EntryListing]
Result = TypeVar("Result")

ATTEMPTS = 20
"""Each conflict is another publisher's success, so that only a crowd comes to the last one."""
LONGEST_PAUSE_SECONDS = 2.0


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

    def read_index(self, *, required: bool = False, key: Path | None = None) -> ZooIndex:
        """Reads and parses `index.json`; an empty index if there is none and none is required.

        With a public `key`, it must be signed, unless it came with the package.

        Raises:
            ZooError: there is none.
            DamagedError: it is not an index.
            SignatureError: it is not signed with that key.
            UnreachableError: the storage does not answer.
        """
        data = self.read_index_bytes()
        if data is None:
            if required:
                raise ZooError(
                    f"{self.storage.address} is not a zoo: it has no {INDEX}; moecast zoo push "
                    "PATH zoo=ZOO makes one"
                )
            return ZooIndex()
        if key is not None and self.storage != builtin_storage():
            check_index_signature(self.storage, data, key=key)
        wrong = f"{self.storage.address}/{INDEX} is not an index"
        hint = "remove it, and push or pull the entries again"
        if self.storage.is_remote:
            hint = "ask its owner to publish it again"
        return ZooIndex.parse(data, wrong=wrong, error=DamagedError, hint=hint)

    def open(self, reference: EntryReference, index: ZooIndex | None = None) -> ZooEntry:
        """Opens an entry, its manifest checked against the digest in the index."""
        index = self.read_index() if index is None else index
        digest = index.resolve(reference)
        version = index.entries[reference.name].versions[digest]
        return self.open_digest(digest, name=reference.name, version=version)

    def open_digest(
        self,
        digest: str,
        *,
        name: str,
        version: EntryVersion | None = None,
        added: Mapping[str, bytes] = MappingProxyType({}),
    ) -> ZooEntry:
        """Opens an entry by its digest; `added` are files that are not stored yet.

        Raises DamagedError if its manifest is missing, has another digest, or is that of another
        entry.
        """
        where = self.storage.address
        signed = None if version is None else version.signature

        def read_blob(sha256: str, limit: int) -> bytes:
            path = blob_path(sha256)
            return added[path] if path in added else self.storage.read(path, limit=limit)

        def read_signature() -> bytes | None:
            if signed is None:
                return None
            return read_checked(
                partial(read_blob, signed.sha256, signed.size),
                sha256=signed.sha256,
                size=signed.size,
                what=f"the signature of {name} in {where}",
            )

        what = f"the manifest of {name} in {where}"
        read = partial(read_blob, digest, MAX_MANIFEST_BYTES)
        manifest = parse_manifest(
            read_checked(read, sha256=digest, size=None, what=what), what=what
        )
        if manifest.name != name:
            raise DamagedError(f"{what} is that of {manifest.name!r}: the index is wrong")
        return ZooEntry(
            manifest,
            where,
            fetch=lambda path, limit: read_blob(manifest.files[path].sha256, limit),
            read_signature=read_signature,
        )

    def open_readable(self, digest: str, *, name: str) -> ZooEntry | None:
        """Opens an entry by its digest; None, with a warning, if it cannot be read."""
        try:
            return self.open_digest(digest, name=name)
        except UnreachableError:
            raise
        except ZooError as error:
            log.warning("%s", escape_controls(str(error)))
            return None


@dataclass(frozen=True)
class WritableZoo(Zoo):
    """A zoo that can be changed. The index is written last, in one step."""

    storage: WritableStorage
    key: Path | None = None
    """Private key (PEM) that signs the index; a signed index cannot be changed without one."""

    def add(self, *entries: ZooEntry, alias: str | None = None) -> None:
        """Copies entries, every byte checked, then lists all of them in the index in one step.

        Interrupted at any point, the index lists all of them or none; unreferenced blobs are
        harmless and are reused by the next attempt.
        """
        files: dict[str, bytes] = {}
        for entry in entries:
            manifest, signature = entry.manifest, entry.read_signature()
            for path, record in manifest.files.items():
                files[blob_path(record.sha256)] = entry.read(path)
            files[blob_path(manifest.digest)] = manifest.to_bytes()
            if signature is not None:
                files[blob_path(hash_bytes(signature))] = signature
        aliases = () if alias is None else (alias,)
        self.register([(entry, aliases) for entry in entries], files=files)

    def register(
        self,
        entries: Iterable[tuple[ZooEntry, Iterable[str]]],
        *,
        files: Mapping[str, bytes] = MappingProxyType({}),
        keeps_names: bool = False,
    ) -> None:
        """Writes the files that are missing, then lists entries, each with aliases, in the index.

        Of two versions of an entry, the later one becomes the latest. With `keeps_names`, `latest`
        and the aliases that are listed go on naming the same versions.
        """
        versions = [(entry.manifest, record_version(entry), aliases) for entry, aliases in entries]

        def list_versions(index: ZooIndex) -> tuple[Entries, None]:
            listings = dict(index.entries)
            for manifest, version, given in versions:
                latest, aliases = manifest.digest, dict.fromkeys(given, manifest.digest)
                listed = {latest: version}
                if (known := listings.get(manifest.name)) is not None:
                    listed = {**known.versions, **listed}
                    aliases = {**known.aliases, **aliases}
                    if keeps_names:
                        latest, aliases = known.latest, {**aliases, **known.aliases}
                listings[manifest.name] = EntryListing(
                    latest=latest, versions=listed, aliases=aliases
                )
            return listings, None

        self._update_index(list_versions, files)

    def move_alias(
        self,
        reference: EntryReference,
        alias: str,
        *,
        check: Callable[[ZooEntry, ZooEntry | None], None],
    ) -> tuple[ZooEntry, ZooEntry | None]:
        """Makes an alias name the version that a reference means; returns it and the earlier one.

        `check` is called with that version and with the one that the alias names now, or None, and
        raises to refuse. Nobody can change the index in between: folders are locked, object stores
        with conditional writes make the second of two check again, the Hub refuses it.
        """

        def point_alias(index: ZooIndex) -> tuple[Entries, tuple[ZooEntry, ZooEntry | None]]:
            if reference.name not in index.entries:
                raise ZooError(
                    f"{unknown('zoo entry', reference.name, index.entries)} in "
                    f"{self.storage.address}. moecast zoo push and pull add entries to yours; "
                    "zoo=ADDRESS names another"
                )
            digest = index.resolve(reference)
            listing = index.entries[reference.name]
            entry, now = self.open(EntryReference(reference.name, digest), index), None
            if alias in listing.aliases:
                now = self.open(EntryReference(reference.name, alias), index)
            check(entry, now)
            aliases = {**listing.aliases, alias: digest}
            changed = listing.model_copy(update={"aliases": aliases})
            return {**index.entries, reference.name: changed}, (entry, now)

        return self._update_index(point_alias)

    def remove(self, reference: EntryReference, *, entirely: bool = False) -> list[str]:
        """Removes a version of an entry, or all of them, from the index; returns the digests.

        The blobs stay until `prune`.
        """

        def unlist_versions(index: ZooIndex) -> tuple[Entries, list[str]]:
            digest = index.resolve(reference)
            listing = index.entries[reference.name]
            removed = list(listing.versions) if entirely else [digest]
            kept = {one: made for one, made in listing.versions.items() if one not in removed}
            entries = {name: one for name, one in index.entries.items() if name != reference.name}
            if kept:
                newest = max(kept, key=lambda digest: kept[digest].created)
                entries[reference.name] = EntryListing(
                    latest=newest if listing.latest in removed else listing.latest,
                    versions=kept,
                    aliases={name: one for name, one in listing.aliases.items() if one in kept},
                )
            return entries, removed

        return self._update_index(unlist_versions)

    def prune(self) -> list[str]:
        """Removes the blobs that no listed entry references; returns their digests.

        Waits for pulls to end: until then, no index lists what they have downloaded. Of an entry
        whose manifest is damaged, the files are unknown and therefore removed. ZooError without an
        index, by which all would be: nothing is changed, and no folder made.
        """
        self.read_index(required=True)

        def remove_unreferenced() -> list[str]:
            with self.storage.changing_blobs(), self.storage.exclusive() as seen:
                index = self.read_index(required=True)
                referenced = self._referenced_blobs(index)
                removed = [name for name in self.storage.names(BLOBS) if name not in referenced]
                signatures = {f"{SIGNATURES}/{name}" for name in self.storage.names(SIGNATURES)}
                signatures.discard(index_signature_path(self.read_index_bytes() or b""))
                if removed or signatures:
                    paths = [*map(blob_path, removed), *sorted(signatures)]
                    self._publish({}, index, paths, seen)
            return removed

        return retry_conflicts(remove_unreferenced)

    def remove_incomplete(self) -> int:
        """Removes what killed writers left; returns the number of files."""
        folders = ("", BLOBS, SIGNATURES)
        with self.storage.changing_blobs(), self.storage.exclusive():
            # Nobody else writes: what another machine has left is abandoned too.
            return sum(self.storage.remove_temporary(one, everything=True) for one in folders)

    def _update_index(
        self,
        change: Callable[[ZooIndex], tuple[Entries, Result]],
        files: Mapping[str, bytes] = MappingProxyType({}),
    ) -> Result:
        """Publishes the index with the listings that `change` makes of those that it has.

        `change` also returns the result. It is called again with the newer index if another
        publisher was faster.
        """

        def update() -> Result:
            # Two writers would lose one's listing; blobs need no lock, equal names are equal bytes.
            with self.storage.exclusive() as seen:
                index = self.read_index()
                listings, result = change(index)
                entries = dict(sorted(listings.items()))
                missing = {path: data for path, data in files.items() if not self._has(path, data)}
                is_changed = entries != index.entries
                if is_changed:
                    changes = {"serial": index.serial + 1, "entries": entries}
                    changed = index.model_copy(update=changes).to_bytes()
                    wrong = f"{self.storage.address} is left as it is, its index would be wrong"
                    index = ZooIndex.parse(changed, wrong=wrong, error=ZooError)
                if is_changed or missing or self.key is not None:
                    self._publish(missing, index, [], seen)
            return result

        return retry_conflicts(update)

    def _publish(
        self, files: Mapping[str, bytes], index: ZooIndex, removed: list[str], seen: Any
    ) -> None:
        paths, written = list(removed), dict(files)
        data, earlier = index.to_bytes(), self.read_index_bytes()
        if self.key is not None:
            written[index_signature_path(data)] = sign_index(data, key=self.key)
        if earlier is not None and self.storage.has(signature := index_signature_path(earlier)):
            if self.key is not None:
                require_owner(self.storage, earlier, key=self.key)
            elif earlier != data:
                raise ZooError(
                    f"the index of {self.storage.address} is signed: give key=KEY.pem, the "
                    "private key of its owner, or readers would refuse the changed one"
                )
            if earlier != data:
                paths.append(signature)
        if self.storage.has_front_page:
            cards = self._read_cards(files, index)
            figures = {figure_path(name): card.png for name, card in cards.items() if card.png}
            written |= {CARD: write_front_page(cards), **figures}
            shown = {f"{FIGURES}/{name}" for name in self.storage.names(FIGURES)}
            paths += sorted(shown - figures.keys())
        self.storage.publish(written, (INDEX, data), paths, seen)

    def _read_cards(self, added: Mapping[str, bytes], index: ZooIndex) -> dict[str, StoredCard]:
        """Returns the card of every entry's latest version; `added` blobs are not stored yet."""
        cards = {}
        for name, listing in index.entries.items():
            try:
                entry = self.open_digest(listing.latest, name=name, added=added)
                text, png = (
                    entry.read(path) if path in entry.manifest.files else None
                    for path in (CARD, FIGURE)
                )
                cards[name] = StoredCard(text or b"", png)
            except DamagedError as error:
                log.warning("%s", escape_controls(str(error)))
                cards[name] = StoredCard()
        return cards

    def _has(self, path: str, data: bytes) -> bool:
        """Whether the same bytes are stored: a damaged blob is written again."""
        if not self.storage.has(path):
            return False
        return self.storage.is_remote or self.storage.read(path, limit=len(data)) == data

    def _referenced_blobs(self, index: ZooIndex) -> set[str]:
        referenced: set[str] = set()
        for name, listing in index.entries.items():
            for digest, version in listing.versions.items():
                referenced.add(digest)
                if version.signature is not None:
                    referenced.add(version.signature.sha256)
                if entry := self.open_readable(digest, name=name):
                    referenced |= {record.sha256 for record in entry.manifest.files.values()}
        return referenced


def record_version(entry: ZooEntry) -> EntryVersion:
    manifest, signature, signed = entry.manifest, entry.read_signature(), None
    if signature is not None:
        signed = FileRecord(sha256=hash_bytes(signature), size=len(signature))
    return EntryVersion(created=manifest.created, size=manifest.size, signature=signed)


def retry_conflicts(change: Callable[[], Result]) -> Result:
    """Calls a function that reads the index and publishes a changed one until it succeeds.

    Pauses are random and grow, so that publishers that met once do not meet again. Raises the
    ConflictError of the last attempt.
    """
    for attempt in range(ATTEMPTS - 1):
        try:
            return change()
        except ConflictError:
            time.sleep(random.uniform(0, min(0.05 * 2**attempt, LONGEST_PAUSE_SECONDS)))
    return change()
