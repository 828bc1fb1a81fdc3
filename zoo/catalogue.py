"""A zoo as static files, whatever serves them: what it lists, and its entries."""

from dataclasses import dataclass

from pydantic import ValidationError

from predictors.errors import unknown
from zoo.digest import check
from zoo.entry import Entry
from zoo.errors import DamagedError, ZooError
from zoo.index import INDEX, MAX_INDEX_BYTES, Index, Reference, Version, blob
from zoo.manifest import MAX_MANIFEST_BYTES, explain, parse_manifest
from zoo.storage import Storage


@dataclass(frozen=True)
class Zoo:
    """The entries of one place."""

    storage: Storage

    def index_bytes(self) -> bytes | None:
        """`index.json` as it stands; None where there is none."""
        try:
            return self.storage.read(INDEX, limit=MAX_INDEX_BYTES)
        except (FileNotFoundError, NotADirectoryError):
            return None

    def index(self, *, required: bool = False) -> Index:
        """What the place lists; an empty index when it has none and that is allowed.

        Raises:
            ZooError: no zoo, DamagedError: an index that is none, UnreachableError.
        """
        return self.parse(self.index_bytes(), required=required)

    def parse(self, data: bytes | None, *, required: bool = False) -> Index:
        """The index in these bytes; raises as `index`."""
        if data is None:
            if required:
                raise ZooError(f"{self.storage.address} is not a zoo: it has no {INDEX}")
            return Index()
        try:
            return Index.model_validate_json(data)
        except ValidationError as error:
            what = f"{self.storage.address}/{INDEX}"
            raise DamagedError(f"{what} is not an index: {explain(error)}") from error

    def holds(self, reference: Reference) -> bool:
        """Whether the reference means exactly one entry here."""
        return len(reference.matches(self.index())) == 1

    def resolve(self, reference: Reference, index: Index | None = None) -> str:
        """The digest that a reference names here; ZooError with the choices when it names none."""
        index = self.index() if index is None else index
        if reference.name not in index.entries:
            raise ZooError(unknown("zoo entry", reference.name, index.entries))
        found = reference.matches(index)
        if len(found) != 1:
            listing = index.entries[reference.name]
            known = [*listing.aliases, *(one[:12] for one in listing.versions)]
            raise ZooError(unknown(f"version of {reference.name}", reference.version, known))
        return found[0]

    def version(self, reference: Reference) -> tuple[str, Version]:
        """The digest that a reference names, and what the index says of it."""
        index = self.index()
        digest = self.resolve(reference, index)
        return digest, index.entries[reference.name].versions[digest]

    def open(self, reference: Reference) -> Entry:
        """The entry, its manifest checked against the digest that the index names."""
        digest, version = self.version(reference)
        return self.open_digest(digest, name=reference.name, version=version)

    def open_digest(self, digest: str, *, name: str, version: Version | None = None) -> Entry:
        """The same by digest alone."""
        what = f"the manifest of {name} in {self.storage.address}"
        data = self.fetch(digest, MAX_MANIFEST_BYTES, what)
        manifest = parse_manifest(check(data, sha256=digest, size=None, what=what), what=what)
        if manifest.name != name:
            raise DamagedError(f"{what} says that it is {manifest.name!r}: the index is wrong")
        signed = None if version is None else version.signature

        def fetch(path: str, limit: int) -> bytes:
            return self.storage.read(blob(manifest.files[path].sha256), limit=limit)

        def signature() -> bytes | None:
            if signed is None:
                return None
            of = f"the signature of {name} in {self.storage.address}"
            found = self.fetch(signed.sha256, signed.size, of)
            return check(found, sha256=signed.sha256, size=signed.size, what=of)

        return Entry(manifest, self.storage.address, fetch, signature)

    def fetch(self, digest: str, limit: int, what: str) -> bytes:
        """A blob's bytes, unchecked; DamagedError when there is no such blob."""
        try:
            return self.storage.read(blob(digest), limit=limit)
        except FileNotFoundError as error:
            raise DamagedError(f"{what} is missing; get the entry again") from error
