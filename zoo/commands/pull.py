"""The commands pull and lock: copy entries, and record their digests in `zoo.lock`."""

from collections.abc import Collection
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from predictors.files import write_atomic
from predictors.records import Sha256, StrictRecord, explain_validation_error
from zoo.catalog import Zoo
from zoo.commands import print_line, summarize
from zoo.config import LockConfig, PullConfig
from zoo.digest import read_plain_file
from zoo.entry import ZooEntry, write_folder
from zoo.errors import ZooError
from zoo.index import MAX_INDEX_BYTES, EntryReference, ZooIndex, parse_reference
from zoo.load import find_entry, required_key
from zoo.locations import builtin_storage, cache_storage, configured_storages
from zoo.manifest import NAME
from zoo.pull import PullCache, ReportProgress, pull_entry
from zoo.rollback_protection import read_fresh_index
from zoo.signing import check_signature
from zoo.storage import Storage


def pull(config: PullConfig) -> dict[str, Any]:
    """Copies entries into the user's zoo, from which they load without a network."""
    entries = pull_entries(config)
    for entry in entries:
        print_line(f"pulled {entry.manifest.name}@{entry.manifest.digest[:12]} into {entry.where}")
    if config.output is not None:
        print_line(f"written as a folder: {config.output}")
    summaries = [asdict(summarize(entry)) for entry in entries]
    return {"pulled": summaries, "into": cache_storage().address}


def pull_entries(config: PullConfig) -> list[ZooEntry]:
    """Pulls the entries that a configuration names; shows progress on a terminal."""
    key = config.require_signature or required_key()
    indexes = read_indexes(config, key=key)
    cache = PullCache(cache_storage())
    builtin = builtin_storage().canonical_address
    entries = []
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
    with Progress(
        *columns, TransferSpeedColumn(), console=console, disable=not console.is_terminal
    ) as bars:
        for zoo, name, digest in choose_entries(config, indexes):
            check = None
            # The built-in zoo came with the package: only a key named here applies to it.
            if key is not None and (
                config.require_signature or zoo.storage.canonical_address != builtin
            ):
                check = partial(check_signature, key=key)
            entry = pull_entry(
                zoo,
                name,
                digest,
                indexes[zoo].version(name, digest),
                cache=cache,
                check=check,
                progress=partial(add_bar, bars, name),
            )
            entries.append(entry)
    if config.output is not None:
        (entry,) = entries
        files = {path: entry.read(path) for path in entry.manifest.files}
        write_folder(config.output, entry.manifest, files, entry.read_signature())
    return entries


def read_indexes(config: PullConfig, *, key: Path | None) -> dict[Zoo, ZooIndex]:
    storages = configured_storages(config.zoo)
    if not storages and config.locked is not None:
        records = read_lockfile(config.locked).entries.values()
        storages = configured_storages(",".join(dict.fromkeys(record.zoo for record in records)))
    if not storages:
        raise ZooError(
            "no zoo to pull from: give zoo=ADDRESS (a folder, builtin, https://, s3://, "
            "hf://OWNER/REPO), or set MOECAST_ZOO"
        )
    zoos = [Zoo(storage) for storage in storages]
    return {
        zoo: read_fresh_index(zoo, accept_rollback=config.accept_rollback, key=key) for zoo in zoos
    }


def choose_entries(config: PullConfig, indexes: dict[Zoo, ZooIndex]) -> list[tuple[Zoo, str, str]]:
    """Returns zoo, name and digest of every entry to pull; ZooError if no zoo has one of them."""
    if config.all:
        # The latest of each comes last, so that it is the latest here too.
        return [
            (zoo, name, digest)
            for zoo, index in indexes.items()
            for name, listing in index.entries.items()
            for digest in sorted(listing.versions, key=lambda digest: digest == listing.latest)
        ]
    if config.locked is not None:
        references = [
            EntryReference(name, record.digest)
            for name, record in read_lockfile(config.locked).entries.items()
        ]
    else:
        assert config.name is not None
        references = [parse_reference(config.name)]
    chosen = []
    for reference in references:
        holders = [zoo for zoo, index in indexes.items() if index.match(reference)]
        zoo = holders[0] if holders else next(iter(indexes))
        chosen.append((zoo, reference.name, indexes[zoo].resolve(reference)))
    return chosen


def add_bar(progress: Progress, name: str, total: int) -> ReportProgress:
    task = progress.add_task(name, total=total)
    return lambda arrived: progress.advance(task, arrived)


class LockedEntry(StrictRecord):
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
        raise ZooError("nothing was pulled yet; name entries: moecast zoo lock names=[NAME,...]")
    entries = [find_entry(name) for name in names]
    origins = find_origins(entries)
    locked = {
        entry.manifest.name: LockedEntry(
            digest=entry.manifest.digest, zoo=origins.get(entry.manifest.digest, entry.where)
        )
        for entry in entries
    }
    # Sorted by name, so that the file suits version control.
    lockfile = Lockfile(entries=dict(sorted(locked.items())))
    write_atomic(config.output, (lockfile.model_dump_json(indent=2) + "\n").encode())
    for name, record in locked.items():
        print_line(f"{name}@{record.digest[:12]} from {record.zoo}")
    print_line(f"written: {config.output}; moecast zoo pull locked={config.output}")
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


def read_lockfile(path: Path) -> Lockfile:
    """Reads a lock file; ZooError if there is none, or its content is not allowed."""
    try:
        lockfile = Lockfile.model_validate_json(read_plain_file(path, limit=MAX_INDEX_BYTES))
    except FileNotFoundError as error:
        raise ZooError(f"{path} does not exist; moecast zoo lock writes it") from error
    except ValidationError as error:
        raise ZooError(f"{path} is not a lock file: {explain_validation_error(error)}") from error
    for name in lockfile.entries:
        if not NAME.fullmatch(name):
            raise ZooError(f"{path}: {name!r} is not the name of an entry")
    return lockfile
