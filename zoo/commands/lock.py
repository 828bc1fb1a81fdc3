"""The command lock, and `zoo.lock`: the digests of entries, for pulling the same bytes later."""

from collections.abc import Collection
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError

from predictors.files import write_atomic
from predictors.records import Sha256, StrictRecord, explain_validation_error
from zoo.catalog import Zoo
from zoo.commands.format import print_line
from zoo.config import LockConfig
from zoo.entry import ZooEntry
from zoo.errors import ZooError
from zoo.index import EntryReference
from zoo.load import find_entry
from zoo.locations import builtin_storage, cache_storage, configured_storages
from zoo.manifest import NAME
from zoo.storage import Storage


class LockedEntry(StrictRecord):
    """The digest of an entry."""

    digest: Sha256
    zoo: str
    """Address of the zoo; another zoo that has the digest serves as well."""


class Lockfile(StrictRecord):
    """The content of `zoo.lock`."""

    format_version: Literal[1] = 1
    entries: dict[str, LockedEntry] = Field(default_factory=dict)


def lock(config: LockConfig) -> dict[str, Any]:
    """Writes the present digest of each name to a lock file."""
    names = config.names or list(Zoo(cache_storage()).read_index().entries)
    if not names:
        raise ZooError("nothing was pulled yet; name entries: python -m zoo lock names=[NAME,...]")
    entries = [find_entry(name) for name in names]
    origins = find_origins(entries)
    locked = {
        entry.manifest.name: LockedEntry(
            digest=entry.manifest.digest, zoo=origins.get(entry.manifest.digest, entry.where)
        )
        for entry in entries
    }
    write_lockfile(config.output, Lockfile(entries=locked))
    for name, record in locked.items():
        print_line(f"{name}@{record.digest[:12]} from {record.zoo}")
    print_line(f"written: {config.output}; python -m zoo pull locked={config.output}")
    return {"entries": {name: record.model_dump() for name, record in locked.items()}}


def find_origins(entries: Collection[ZooEntry]) -> dict[str, str]:
    """Returns digest to the address of the first zoo that lists it: `builtin`, or of MOECAST_ZOO.

    Pulled entries are in the cache, which other machines do not have.
    """
    references = {
        entry.manifest.digest: EntryReference(entry.manifest.name, entry.manifest.digest)
        for entry in entries
    }
    storages: list[tuple[str, Storage]] = [("builtin", builtin_storage())]
    storages += [(storage.address, storage) for storage in configured_storages()]
    origins: dict[str, str] = {}
    for address, storage in storages:
        if len(origins) == len(references):
            break
        index = Zoo(storage).read_index()
        for digest, reference in references.items():
            if digest not in origins and index.has(reference):
                origins[digest] = address
    return origins


def write_lockfile(path: Path, lockfile: Lockfile) -> None:
    """Writes the file, sorted by name so that it suits version control."""
    ordered = Lockfile(entries=dict(sorted(lockfile.entries.items())))
    write_atomic(path, (ordered.model_dump_json(indent=2) + "\n").encode())


def read_lockfile(path: Path) -> Lockfile:
    """Reads a lock file; ZooError if there is none, or its content is not allowed."""
    try:
        lockfile = Lockfile.model_validate_json(path.read_bytes())
    except FileNotFoundError as error:
        raise ZooError(f"{path} does not exist; python -m zoo lock writes it") from error
    except ValidationError as error:
        raise ZooError(f"{path} is not a lock file: {explain_validation_error(error)}") from error
    for name in lockfile.entries:
        if not NAME.fullmatch(name):
            raise ZooError(f"{path}: {name!r} is not the name of an entry")
    return lockfile
