"""The command lock: records the digest of each entry, and a zoo that other machines reach."""

import logging
from collections.abc import Collection, Sequence
from typing import Any

from predictors.files import write_atomic
from predictors.terminal import escape_controls
from zoo.catalog import Zoo
from zoo.commands import print_line
from zoo.config import LockConfig
from zoo.entry import ZooEntry
from zoo.errors import ZooError
from zoo.index import EntryReference
from zoo.load import find_entry
from zoo.locations import builtin_storage, cache_storage, configured_storages, open_zoo_storage
from zoo.lockfile import LockedEntry, Lockfile
from zoo.origins import is_portable, read_origins
from zoo.storage import Storage

log = logging.getLogger(__name__)

BUILTIN = "builtin"


def lock(config: LockConfig) -> dict[str, Any]:
    """Writes the present digest of each name to a lock file.

    Raises:
        ZooError: an entry is in no zoo but this machine's cache, or `zoo` does not have it.
    """
    names = config.names or list(Zoo(cache_storage()).read_index().entries)
    if not names:
        raise ZooError("nothing was pulled yet; name entries: moecast zoo lock names=[NAME,...]")
    entries = [find_entry(name) for name in names]
    addresses = find_addresses(entries, zoo=config.zoo)
    unpublished = [
        f"{entry.manifest.name}@{entry.manifest.digest[:12]}"
        for entry in entries
        if entry.manifest.digest not in addresses
    ]
    if unpublished:
        missing = f"not in {config.zoo}" if config.zoo else "only in the cache of this machine"
        raise ZooError(
            f"{', '.join(unpublished)}: {missing}, "
            "so other machines could not pull it. Publish it (moecast zoo push PATH "
            "zoo=hf://OWNER/REPO), then moecast zoo lock zoo=hf://OWNER/REPO"
        )
    locked = {
        entry.manifest.name: LockedEntry(
            digest=entry.manifest.digest, zoo=addresses[entry.manifest.digest]
        )
        for entry in entries
    }
    warn_of_local_zoos(locked)
    # Sorted by name, so that the file suits version control.
    lockfile = Lockfile(entries=dict(sorted(locked.items())))
    write_atomic(config.output, (lockfile.model_dump_json(indent=2) + "\n").encode())
    for name, record in locked.items():
        print_line(f"{name}@{record.digest[:12]} from {record.zoo}")
    print_line(f"written: {config.output}; moecast zoo pull locked={config.output}")
    return {"entries": {name: record.model_dump() for name, record in locked.items()}}


def find_addresses(entries: Collection[ZooEntry], *, zoo: str | None) -> dict[str, str]:
    """Returns digest to the address of a zoo that has it; an entry that no zoo has is left out.

    Of several zoos, one that other machines reach comes first: the built-in one, the one that the
    entry was pulled from, those of MOECAST_ZOO. With `zoo`, only those zoos are read.
    """
    wanted = {
        entry.manifest.digest: EntryReference(entry.manifest.name, entry.manifest.digest)
        for entry in entries
    }
    if zoo is not None:
        return find_holders(wanted, configured_storages(zoo))
    holders = find_holders(wanted, [builtin_storage()])
    recorded = read_origins(cache_storage())
    pulled = {digest: recorded[digest] for digest in wanted if digest in recorded}
    far = {digest: place for digest, place in pulled.items() if is_portable_address(place)}
    holders = {**far, **holders}
    configured = sorted(configured_storages(), key=is_portable, reverse=True)
    missing = {digest: name for digest, name in wanted.items() if digest not in holders}
    return {**pulled, **find_holders(missing, configured), **holders}


def find_holders(wanted: dict[str, EntryReference], storages: Sequence[Storage]) -> dict[str, str]:
    """Returns digest to the address of the first zoo that lists it."""
    builtin = builtin_storage().canonical_address
    locked: dict[str, str] = {}
    for storage in storages:
        if len(locked) == len(wanted):
            break
        index = Zoo(storage).read_index()
        address = BUILTIN if storage.canonical_address == builtin else storage.address
        for digest, reference in wanted.items():
            if digest not in locked and index.has(reference):
                locked[digest] = address
    return locked


def is_portable_address(address: str) -> bool:
    return is_portable(open_zoo_storage(address))


def warn_of_local_zoos(locked: dict[str, LockedEntry]) -> None:
    """Logs a warning for each zoo whose address is of use on this machine only."""
    for place in sorted({record.zoo for record in locked.values()} - {BUILTIN}):
        if not is_portable_address(place):
            names = [name for name, record in locked.items() if record.zoo == place]
            log.warning(
                "%s is on this machine: elsewhere, %s can be pulled only where the same address "
                "leads to this zoo. moecast zoo lock zoo=ADDRESS names another one",
                escape_controls(place),
                ", ".join(names),
            )
