"""`index.json`, references to the entries in it, and `zoo.lock`, which pins some of them.

An entry's digest is that of its manifest, and the manifest has the digest of each file: a resolved
reference therefore determines every byte.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from predictors.errors import unknown
from predictors.files import require_plain_file
from predictors.records import Sha256, StrictRecord
from zoo.digest import HEX64
from zoo.errors import ZooError
from zoo.manifest import MAX_ENTRY_BYTES, NAME, Created, EntryName, FileRecord

INDEX = "index.json"
BLOBS = "blobs/sha256"
SIGNATURES = "signatures"
"""Folder of the signatures of indexes."""
MAX_INDEX_BYTES = 64 << 20
LATEST = "latest"
PREFIX = re.compile(r"[0-9a-f]{8,64}")
"""A digest or the beginning of one."""
ALIAS = re.compile(r"[a-z][a-z0-9._-]{0,63}")
Alias = Annotated[str, Field(pattern=f"^{ALIAS.pattern}$")]
MAX_SERIAL = 2**31 - 1
"""Bounds the serial of an index: each change adds one."""


@dataclass(frozen=True)
class EntryReference:
    """`NAME`, `NAME@latest`, `NAME@ALIAS` or `NAME@DIGEST`."""

    name: str
    version: str = LATEST


class EntryVersion(StrictRecord):
    created: Created
    size: Annotated[int, Field(ge=0, le=MAX_ENTRY_BYTES)]
    signature: FileRecord | None = None
    """Made by `zoo sign`. It signs the entry's files, so it is not one of them."""


class EntryListing(StrictRecord):
    """All versions of an entry in a zoo, by digest."""

    latest: Sha256
    versions: dict[Sha256, EntryVersion]
    aliases: dict[Alias, Sha256] = {}
    """Other names of versions, such as `stable`."""

    @model_validator(mode="after")
    def _name_listed_versions(self) -> Self:
        for name, digest in (("latest", self.latest), *self.aliases.items()):
            if digest not in self.versions:
                raise ValueError(f"{name} is {digest[:12]}..., which is none of the versions")
        return self

    def newest_first(self) -> list[str]:
        """Returns the digests: the latest, then those of the others in the order of their age."""
        made = {digest: version.created for digest, version in self.versions.items()}
        return sorted(made, key=lambda one: (one == self.latest, made[one]), reverse=True)


class ZooIndex(StrictRecord):
    """The content of `index.json`."""

    format_version: Literal[1] = 1
    serial: Annotated[int, Field(ge=0, le=MAX_SERIAL)] = 0
    """Grows with every change."""
    expires: None = Field(default=None, exclude=True)
    """A key of the indexes that earlier versions wrote."""
    entries: dict[EntryName, EntryListing] = {}

    def match(self, reference: EntryReference) -> list[str]:
        """Returns the digests that the reference can mean."""
        listing = self.entries.get(reference.name)
        if listing is None:
            return []
        named = {**listing.aliases, LATEST: listing.latest}
        if reference.version in named:
            return [named[reference.version]]
        if not PREFIX.fullmatch(reference.version):
            return []
        return [digest for digest in listing.versions if digest.startswith(reference.version)]

    def has(self, reference: EntryReference) -> bool:
        """Whether the reference means exactly one version."""
        return len(self.match(reference)) == 1

    def resolve(self, reference: EntryReference) -> str:
        """Returns the digest that a reference means; ZooError with the choices if it means none."""
        if reference.name not in self.entries:
            raise ZooError(unknown("zoo entry", reference.name, self.entries))
        digests = self.match(reference)
        if len(digests) != 1:
            listing = self.entries[reference.name]
            known = [*listing.aliases, *(digest[:12] for digest in listing.versions)]
            raise ZooError(unknown(f"version of {reference.name}", reference.version, known))
        return digests[0]


def parse_reference(text: str) -> EntryReference:
    """Parses a reference; ZooError if the text cannot name an entry."""
    name, at, version = text.partition("@")
    is_version = PREFIX.fullmatch(version) or ALIAS.fullmatch(version)
    if not NAME.fullmatch(name) or (at and not is_version):
        raise ZooError(
            f"{text!r} is not NAME, NAME@latest, NAME@ALIAS or NAME@DIGEST; see: moecast zoo list"
        )
    return EntryReference(name, version or LATEST)


def is_alias(version: str) -> bool:
    """Whether it is the name of a version, and not `latest` or a digest."""
    is_reserved = version == LATEST or PREFIX.fullmatch(version)
    return not is_reserved and ALIAS.fullmatch(version) is not None


def check_alias(alias: str) -> str:
    """Returns the alias; ZooError if it could be taken for `latest` or a digest."""
    if not is_alias(alias):
        raise ZooError(
            f"alias={alias}: must begin with a small letter, and be neither latest nor a digest"
        )
    return alias


def blob_path(digest: str) -> str:
    assert HEX64.fullmatch(digest)
    return f"{BLOBS}/{digest}"


class LockedEntry(StrictRecord):
    digest: Sha256
    zoo: str
    """Address of the zoo; another zoo that has the digest serves as well."""


class Lockfile(StrictRecord):
    """The content of `zoo.lock`."""

    format_version: Literal[1] = 1
    entries: dict[EntryName, LockedEntry] = {}


def read_lockfile(path: Path) -> Lockfile:
    """Reads a lock file; ZooError if there is none, or its content is not allowed."""
    try:
        with require_plain_file(path, ZooError).open("rb") as file:
            data = file.read(MAX_INDEX_BYTES)
    except FileNotFoundError as error:
        raise ZooError(f"{path} does not exist; moecast zoo lock writes it") from error
    except OSError as error:
        raise ZooError(f"{path} cannot be read: {error.strerror}") from error
    return Lockfile.parse(data, wrong=f"{path} is not a lock file", error=ZooError)
