"""A zoo that can be added to and taken from. The index is written last, in one step."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from zoo.card import front_page
from zoo.catalogue import Zoo
from zoo.digest import digest_of
from zoo.entry import CARD, Entry
from zoo.index import BLOBS, INDEX, LATEST, Index, Listing, Reference, Version, blob
from zoo.manifest import FileRecord, Manifest, parse_manifest
from zoo.storage import WritableStorage


@dataclass(frozen=True)
class WritableZoo(Zoo):
    """The entries of a place that can be written to."""

    storage: WritableStorage

    def add(self, entry: Entry, *, replace: bool = False, alias: str | None = None) -> str:
        """Copies a whole entry, every byte checked on the way, and then names it in the index.

        Killed at any point, the index names complete entries only; blobs that no index names are
        harmless and are used by the next try. `replace` forgets the entry's earlier versions and
        removes the blobs that nothing names any more. Returns the entry's digest.
        """
        manifest = entry.manifest
        files = {blob(record.sha256): entry.read(path) for path, record in manifest.files.items()}
        files[blob(manifest.digest)] = manifest.to_bytes()
        signature = entry.signature()
        if signature is not None:
            files[blob(digest_of(signature))] = signature
        self.name(manifest, signature=signature, files=files, replace=replace, alias=alias)
        return manifest.digest

    def name(
        self,
        manifest: Manifest,
        *,
        signature: bytes | None = None,
        files: Mapping[str, bytes] | None = None,
        replace: bool = False,
        alias: str | None = None,
    ) -> None:
        """Names an entry in the index, after writing those of the files that are not there."""
        signed = None
        if signature is not None:
            signed = FileRecord(sha256=digest_of(signature), size=len(signature))

        def change(index: Index) -> dict[str, Listing]:
            known = index.entries.get(manifest.name)
            kept = {} if known is None or replace else known.versions
            aliases = {} if known is None or replace else known.aliases
            version = Version(created=manifest.created, size=manifest.size, signature=signed)
            listing = Listing(
                latest=manifest.digest,
                versions={**kept, manifest.digest: version},
                aliases=aliases if alias is None else {**aliases, alias: manifest.digest},
            )
            return {**index.entries, manifest.name: listing}

        self._change(change, files or {}, prune=replace)

    def remove(self, reference: Reference) -> list[str]:
        """Takes an entry, or one version of it, out of the index; returns the digests.

        The bytes stay until `prune`.
        """
        gone: list[str] = []

        def change(index: Index) -> dict[str, Listing]:
            digest = self.resolve(reference, index)
            listing = index.entries[reference.name]
            entries = dict(index.entries)
            whole = reference.version == LATEST
            gone[:] = list(listing.versions) if whole else [digest]
            left = {one: version for one, version in listing.versions.items() if one not in gone}
            del entries[reference.name]
            if left:
                newest = max(left, key=lambda one: left[one].created)
                entries[reference.name] = Listing(
                    latest=newest if listing.latest in gone else listing.latest,
                    versions=left,
                    aliases={a: one for a, one in listing.aliases.items() if one not in gone},
                )
            return entries

        self._change(change, {})
        return gone

    def prune(self) -> list[str]:
        """Removes the blobs that no listed entry names; returns their digests."""
        with self.storage.exclusive():
            index = self.index()
            removed = self._unnamed(index)
            if removed:
                self._publish({}, index, removed)
        return removed

    def renew(self, *, expires_days: float | None) -> Index:
        """Writes the index anew, with a higher serial and another date, or none."""
        expires = None
        if expires_days is not None:
            expires = datetime.now(UTC).replace(microsecond=0) + timedelta(days=expires_days)
        with self.storage.exclusive():
            index = self.index()
            changed = index.model_copy(update={"serial": index.serial + 1, "expires": expires})
            self._publish({}, changed, [])
        return changed

    def _change(
        self,
        change: Callable[[Index], dict[str, Listing]],
        files: Mapping[str, bytes],
        *,
        prune: bool = False,
    ) -> None:
        # Two writers would lose one's listing; blobs need no lock, equal names are equal bytes.
        with self.storage.exclusive():
            index = self.index()
            entries = dict(sorted(change(index).items()))
            missing = {path: data for path, data in files.items() if not self._has(path, data)}
            changed = index.model_copy(update={"serial": index.serial + 1, "entries": entries})
            removed = self._unnamed(changed, coming=files) if prune else []
            if entries != index.entries or missing or removed:
                self._publish(missing, changed if entries != index.entries else index, removed)

    def _publish(self, files: Mapping[str, bytes], index: Index, removed: list[str]) -> None:
        paths = [blob(one) for one in removed]
        written = dict(files)
        if self.storage.has_front_page:
            written[CARD] = front_page(self._cards(files, index))
        self.storage.publish(written, index=(INDEX, index.to_bytes()), removed=paths)

    def _cards(self, coming: Mapping[str, bytes], index: Index) -> dict[str, bytes]:
        """The card of every entry's newest version; those that are coming are not there yet."""
        cards = {}
        for name, listing in index.entries.items():
            data = coming.get(blob(listing.latest))
            if data is None:
                entry = self.open_digest(listing.latest, name=name)
                cards[name] = entry.read(CARD) if CARD in entry.manifest.files else b""
                continue
            record = parse_manifest(data, what=name).files.get(CARD)
            if record is None:
                cards[name] = b""
            elif blob(record.sha256) in coming:
                cards[name] = coming[blob(record.sha256)]
            else:
                cards[name] = self.fetch(record.sha256, record.size, f"the card of {name}")
        return cards

    def _has(self, path: str, data: bytes) -> bool:
        """Whether the same bytes are there: a damaged blob is written anew."""
        if not self.storage.has(path):
            return False
        return self.storage.is_remote or self.storage.read(path, limit=len(data)) == data

    def _unnamed(self, index: Index, *, coming: Mapping[str, bytes] | None = None) -> list[str]:
        named: set[str] = set()
        for name, listing in index.entries.items():
            for digest, version in listing.versions.items():
                named.add(digest)
                if version.signature is not None:
                    named.add(version.signature.sha256)
                if coming is None or blob(digest) not in coming:
                    manifest = self.open_digest(digest, name=name).manifest
                    named |= {record.sha256 for record in manifest.files.values()}
        named |= {path.rpartition("/")[2] for path in coming or ()}
        return [name for name in self.storage.names(BLOBS) if name not in named]
