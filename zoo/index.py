"""`index.json` and `blobs/sha256/DIGEST`: a zoo as static files, whatever serves them.

An entry's digest is that of its manifest, and the manifest names the digest of each file: so a
name resolved once names every byte.
"""

import re
from dataclasses import dataclass
from typing import Annotated, Literal

from filelock import FileLock
from pydantic import Field, ValidationError

from predictors.errors import unknown
from zoo.digest import HEX64, check
from zoo.entry import Entry
from zoo.errors import DamagedError, ZooError
from zoo.manifest import (
    MAX_MANIFEST_BYTES,
    NAME,
    Manifest,
    Sha256,
    Strict,
    explain,
    parse_manifest,
)
from zoo.places import FolderPlace, Place

INDEX = "index.json"
MAX_INDEX_BYTES = 64 << 20
LATEST = "latest"
PREFIX = re.compile(r"[0-9a-f]{8,64}")
"""A digest, or enough of its beginning to be meant."""


class Version(Strict):
    """One revision of an entry."""

    created: str
    size: int


class Listing(Strict):
    """All revisions of an entry that a zoo holds, by digest."""

    latest: Sha256
    versions: dict[Sha256, Version]


class Index(Strict):
    """The whole of `index.json`."""

    format_version: Literal[1] = 1
    serial: Annotated[int, Field(ge=0)] = 0
    """Grows with every change, so that an older index can be told from a newer one."""
    entries: dict[str, Listing] = {}


@dataclass(frozen=True)
class Reference:
    """`NAME`, `NAME@latest` or `NAME@DIGEST`."""

    name: str
    version: str = LATEST

    def __str__(self) -> str:
        return self.name if self.version == LATEST else f"{self.name}@{self.version}"


def parse_reference(text: str) -> Reference:
    """ZooError when the text cannot name an entry."""
    name, at, version = text.partition("@")
    good = NAME.fullmatch(name) and (not at or version == LATEST or PREFIX.fullmatch(version))
    if not good:
        raise ZooError(f"{text!r} is not NAME, NAME@latest or NAME@DIGEST; see: python -m zoo list")
    return Reference(name, version or LATEST)


def blob(digest: str) -> str:
    assert HEX64.fullmatch(digest)
    return f"blobs/sha256/{digest}"


@dataclass(frozen=True)
class Zoo:
    """The entries of one place."""

    place: Place

    def index(self, *, required: bool = False) -> Index:
        """What the place lists; an empty index when it has none and that is allowed."""
        try:
            data = self.place.read(INDEX, limit=MAX_INDEX_BYTES)
        except (FileNotFoundError, NotADirectoryError) as error:
            if required:
                raise ZooError(f"{self.place.where} is not a zoo: it has no {INDEX}") from error
            return Index()
        try:
            return Index.model_validate_json(data)
        except ValidationError as error:
            what = f"{self.place.where}/{INDEX}"
            raise DamagedError(f"{what} is not an index: {explain(error)}") from error

    def matches(self, reference: Reference) -> list[str]:
        """The digests that a reference can mean here."""
        listing = self.index().entries.get(reference.name)
        if listing is None:
            return []
        if reference.version == LATEST:
            return [listing.latest]
        return [one for one in listing.versions if one.startswith(reference.version)]

    def holds(self, reference: Reference) -> bool:
        """Whether the reference means exactly one entry here."""
        return len(self.matches(reference)) == 1

    def resolve(self, reference: Reference) -> str:
        """The digest that a reference names here; ZooError with the choices when it names none."""
        entries = self.index().entries
        if reference.name not in entries:
            raise ZooError(unknown("zoo entry", reference.name, entries))
        found = self.matches(reference)
        if len(found) != 1:
            known = [one[:12] for one in entries[reference.name].versions]
            raise ZooError(unknown(f"version of {reference.name}", reference.version, known))
        return found[0]

    def open(self, reference: Reference) -> Entry:
        """The entry, its manifest checked against the digest that the index names."""
        digest = self.resolve(reference)
        what = f"the manifest of {reference.name} in {self.place.where}"
        data = self.fetch(digest, MAX_MANIFEST_BYTES, what)
        manifest = parse_manifest(check(data, sha256=digest, size=None, what=what), what=what)
        if manifest.name != reference.name:
            raise DamagedError(f"{what} says that it is {manifest.name!r}: the index is wrong")

        def fetch(path: str, limit: int) -> bytes:
            return self.place.read(blob(manifest.files[path].sha256), limit=limit)

        return Entry(manifest, self.place.where, fetch)

    def fetch(self, digest: str, limit: int, what: str) -> bytes:
        try:
            return self.place.read(blob(digest), limit=limit)
        except FileNotFoundError as error:
            raise DamagedError(f"{what} is missing; get the entry again") from error


@dataclass(frozen=True)
class WritableZoo(Zoo):
    """A zoo in a folder, to which entries can be added."""

    place: FolderPlace

    def add(self, entry: Entry, *, replace: bool = False) -> str:
        """Copies a whole entry, every byte checked on the way, and then names it in the index.

        Killed at any point, the index names complete entries only; blobs that no index names are
        harmless and are used by the next try. `replace` forgets the entry's earlier versions and
        removes the blobs that nothing names any more. Returns the entry's digest.
        """
        manifest = entry.manifest
        digest = manifest.digest
        self.place.folder.mkdir(parents=True, exist_ok=True)
        # Two writers would lose one's listing; blobs need no lock, equal names are equal bytes.
        with FileLock(self.place.folder / ".lock"):
            for path, record in manifest.files.items():
                self.put(record.sha256, entry.read(path))
            self.put(digest, manifest.to_bytes())
            index = self.index()
            known = index.entries.get(manifest.name)
            kept = {} if known is None or replace else known.versions
            listing = Listing(
                latest=digest,
                versions={**kept, digest: Version(created=manifest.created, size=manifest.size)},
            )
            entries = {**index.entries, manifest.name: listing}
            changed = Index(serial=index.serial + 1, entries=dict(sorted(entries.items())))
            if entries != index.entries:
                self.place.write(INDEX, (changed.model_dump_json(indent=2) + "\n").encode())
            if replace:
                self.prune()
        return digest

    def put(self, digest: str, data: bytes) -> None:
        """Writes a blob unless the same bytes are there already."""
        check(data, sha256=digest, size=len(data), what=f"a file for {self.place.where}")
        try:
            if self.place.read(blob(digest), limit=len(data)) == data:
                return
        except FileNotFoundError:
            pass
        self.place.write(blob(digest), data)

    def prune(self) -> None:
        """Removes the blobs that no listed entry names."""
        named: set[str] = set()
        for name, listing in self.index().entries.items():
            for digest in listing.versions:
                manifest: Manifest = self.open(Reference(name, digest)).manifest
                named |= {digest, *(record.sha256 for record in manifest.files.values())}
        for name in self.place.names("blobs/sha256"):
            if name not in named:
                self.place.remove(f"blobs/sha256/{name}")
