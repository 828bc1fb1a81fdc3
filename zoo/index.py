"""`index.json` and the names in it.

An entry's digest is that of its manifest, and the manifest names the digest of each file: so a name
resolved once names every byte.
"""

import re
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Annotated, Literal

from pydantic import AwareDatetime, Field

from zoo.digest import HEX64
from zoo.errors import ZooError
from zoo.manifest import NAME, FileRecord, Sha256, Strict

INDEX = "index.json"
BLOBS = "blobs/sha256"
MAX_INDEX_BYTES = 64 << 20
LATEST = "latest"
PREFIX = re.compile(r"[0-9a-f]{8,64}")
"""A digest, or enough of its beginning to be meant."""
ALIAS = re.compile(r"[a-z][a-z0-9._-]{0,63}")
Alias = Annotated[str, Field(pattern=f"^{ALIAS.pattern}$")]


class Version(Strict):
    """One revision of an entry."""

    created: str
    size: int
    signature: FileRecord | None = None
    """Made by `zoo sign`, beside the entry: it cannot be among the files that it signs."""


class Listing(Strict):
    """All revisions of an entry that a zoo holds, by digest."""

    latest: Sha256
    versions: dict[Sha256, Version]
    aliases: dict[Alias, Sha256] = {}
    """Other names of revisions, such as `stable`."""


class Index(Strict):
    """The whole of `index.json`."""

    format_version: Literal[1] = 1
    serial: Annotated[int, Field(ge=0)] = 0
    """Grows with every change, so that an older index can be told from a newer one."""
    expires: AwareDatetime | None = None
    """After which the index is not to be trusted any more; None: never."""
    entries: dict[str, Listing] = {}

    def to_bytes(self) -> bytes:
        """As it is written."""
        return (self.model_dump_json(indent=2) + "\n").encode()

    def has_expired(self) -> bool:
        """Whether its date is past."""
        return self.expires is not None and datetime.now(UTC) > self.expires


@dataclass(frozen=True)
class Reference:
    """`NAME`, `NAME@latest`, `NAME@ALIAS` or `NAME@DIGEST`."""

    name: str
    version: str = LATEST

    def __str__(self) -> str:
        return self.name if self.version == LATEST else f"{self.name}@{self.version}"

    def matches(self, index: Index) -> list[str]:
        """The digests that it can mean there."""
        listing = index.entries.get(self.name)
        if listing is None:
            return []
        if self.version == LATEST:
            return [listing.latest]
        if self.version in listing.aliases:
            return [listing.aliases[self.version]]
        if not PREFIX.fullmatch(self.version):
            return []
        return [one for one in listing.versions if one.startswith(self.version)]


def parse_reference(text: str) -> Reference:
    """ZooError when the text cannot name an entry."""
    name, at, version = text.partition("@")
    known = PREFIX.fullmatch(version) or ALIAS.fullmatch(version)
    if not NAME.fullmatch(name) or (at and not known):
        raise ZooError(
            f"{text!r} is not NAME, NAME@latest, NAME@ALIAS or NAME@DIGEST; see: python -m zoo list"
        )
    return Reference(name, version or LATEST)


def blob(digest: str) -> str:
    """Path of the file with these bytes."""
    assert HEX64.fullmatch(digest)
    return f"{BLOBS}/{digest}"
