"""The commands pull and lock: entries of other zoos, and which of them this machine has."""

import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from predictors.files import write_atomic
from zoo.catalog import Zoo
from zoo.commands import print_line, summarize
from zoo.config import LockConfig, PullConfig
from zoo.entry import ZooEntry
from zoo.errors import ZooError
from zoo.index import (
    PREFIX,
    EntryReference,
    LockedEntry,
    Lockfile,
    ZooIndex,
    parse_reference,
    read_lockfile,
)
from zoo.load import find_entry, pull_references
from zoo.manifest import EntryManifest, name_entry
from zoo.signing import required_key
from zoo.storage import builtin_storage, cache_storage, configured_storages, open_zoo_storage
from zoo.storage.base import Storage

BUILTIN = "builtin"


def pull(
    name: str, *, zoo: str | None = None, require_signature: str | Path | None = None
) -> ZooEntry:
    """Copies an entry into the user's zoo, from which `load` finds it without a network.

    Args:
        name: NAME, NAME@latest, NAME@ALIAS or NAME@DIGEST.
        zoo: zoos to pull from, separated by commas, in order of preference; default: MOECAST_ZOO.
        require_signature: public key (PEM) with which the zoo's index and the entry must be signed.

    Raises:
        ZooError: there is no such zoo or entry, or what arrived is damaged.

    Example:
        >>> entry = pull("qwen2-moe-tiny/stride", zoo="builtin")
        >>> entry.manifest.kind
        'stride'
    """
    (entry,) = pull_entries(
        PullConfig(
            name=name,
            zoo=zoo,
            require_signature=None if require_signature is None else Path(require_signature),
        )
    )
    return entry


def pull_and_print(config: PullConfig, *, bundle: Sequence[str] = ()) -> dict[str, Any]:
    """Copies entries into the user's zoo, from which they load without a network.

    A model as the name means its entries of the kinds in `bundle`, all of them or none.
    """
    entries = pull_entries(config, bundle=bundle)
    for entry in entries:
        print_line(f"pulled {entry.manifest.name}@{entry.manifest.digest[:12]} into {entry.where}")
    return {"pulled": [summarize(entry) for entry in entries], "into": cache_storage().address}


def pull_entries(config: PullConfig, *, bundle: Sequence[str] = ()) -> list[ZooEntry]:
    """Pulls the entries that a configuration names."""
    locked = {} if config.locked is None else read_lockfile(config.locked).entries
    key = config.require_signature or required_key()
    indexes = read_indexes(configured_storages(config.zoo), key=key)
    if not config.zoo:
        # Each entry's own, if the zoos of this machine do not have it.
        zoos = dict.fromkeys(
            record.zoo
            for name, record in locked.items()
            if not any(index.has(EntryReference(name, record.digest)) for index in indexes.values())
        )
        indexes |= read_indexes(map(open_zoo_storage, zoos), key=key)
    if not indexes:
        raise ZooError(
            "no zoo to pull from: give zoo=ADDRESS (a folder, builtin, https://, s3://, "
            "hf://OWNER/REPO), or set MOECAST_ZOO"
        )
    if config.all:
        # What comes last is what a name means here: the latest and the aliases of the first zoo.
        chosen = [
            (zoo, EntryReference(name, version))
            for zoo, index in reversed(indexes.items())
            for name, listing in index.entries.items()
            for version in (
                *sorted(listing.versions, key=lambda digest: digest == listing.latest),
                *listing.aliases,
            )
        ]
    elif config.locked is not None:
        references = [EntryReference(name, record.digest) for name, record in locked.items()]
        chosen = find_references(references, indexes)
    else:
        assert config.name is not None
        chosen = find_references(parse_names(config.name, bundle), indexes)
    return pull_references(chosen, indexes, require_signature=config.require_signature)


def read_indexes(storages: Iterable[Storage], *, key: Path | None) -> dict[Zoo, ZooIndex]:
    return {Zoo(one): Zoo(one).read_index(required=True, key=key) for one in storages}


def parse_names(name: str, bundle: Sequence[str]) -> list[EntryReference]:
    """Parses an entry's name, or a model's (MODEL, MODEL@ALIAS): one of its bundle's entries each.

    The digests of the entries differ, so that none names a whole bundle.
    """
    model, at, version = name.partition("@")
    if "/" in name or not bundle:
        return [parse_reference(name)]
    if PREFIX.fullmatch(version):
        raise ZooError(
            f"{name}: {version} names one entry, {model} stands for {len(bundle)}: "
            f"{name_entry(model, bundle[0])}@{version}, or {model}@ALIAS"
        )
    return [parse_reference(f"{name_entry(model, kind)}{at}{version}") for kind in bundle]


def find_references(
    references: Sequence[EntryReference], indexes: dict[Zoo, ZooIndex]
) -> list[tuple[Zoo, EntryReference]]:
    """Returns each reference with the first zoo that has it.

    Raises ZooError if no zoo has one of them, which it names.
    """
    known = {name for index in indexes.values() for name in index.entries}
    listed = [reference.name for reference in references if reference.name in known]
    missing = [reference.name for reference in references if reference.name not in known]
    if listed and missing:
        zoos = " and ".join(zoo.storage.address for zoo in indexes)
        raise ZooError(
            f"{zoos} has no {', '.join(missing)}; one entry is pulled by its name: moecast zoo "
            f"pull {listed[0]}"
        )
    chosen = []
    for reference in references:
        holders = [zoo for zoo, index in indexes.items() if index.match(reference)]
        zoo = holders[0] if holders else next(iter(indexes))
        indexes[zoo].resolve(reference)  # raises, with the choices, if there is none
        chosen.append((zoo, reference))
    return chosen


def lock(config: LockConfig) -> dict[str, Any]:
    """Writes the present digest of each name to a lock file, and a zoo that has it.

    Raises:
        ZooError: none of the zoos has an entry.
        SignatureError: MOECAST_REQUIRE_SIGNATURE is set and a zoo or an entry is not signed so.
    """
    names = config.names or list(Zoo(cache_storage()).read_index().entries)
    if not names:
        raise ZooError("nothing was pulled yet; name entries: moecast zoo lock names=[NAME,...]")
    locked, unpublished = {}, []
    for manifest in (find_entry(name).manifest for name in names):
        address = find_address(manifest, config.zoo)
        if address is None:
            unpublished.append(f"{manifest.name}@{manifest.digest[:12]}")
        else:
            locked[manifest.name] = LockedEntry(digest=manifest.digest, zoo=address)
    if unpublished:
        zoos = config.zoo or "the built-in zoo or MOECAST_ZOO"
        raise ZooError(
            f"{', '.join(unpublished)}: not in {zoos}, so other machines could not pull it. "
            "Name the zoo that has it (moecast zoo lock zoo=hf://OWNER/REPO), or publish it "
            "there first (moecast zoo push PATH zoo=...)"
        )
    # Sorted by name, so that the file suits version control.
    lockfile = Lockfile(entries=dict(sorted(locked.items())))
    write_atomic(config.output, lockfile.to_bytes())
    for name, record in locked.items():
        print_line(f"{name}@{record.digest[:12]} from {record.zoo}")
    pull = shlex.join(["moecast", "zoo", "pull", f"locked={config.output}"])
    print_line(f"written: {config.output}; {pull}")
    return {"entries": {name: record.model_dump() for name, record in locked.items()}}


def find_address(manifest: EntryManifest, zoos: str | None) -> str | None:
    """Returns the address of the first zoo that has the entry; None if none has.

    They are `zoos`, by default the built-in one and those of MOECAST_ZOO.
    """
    reference = EntryReference(manifest.name, manifest.digest)
    configured = configured_storages(zoos)
    for storage in configured if zoos else [builtin_storage(), *configured]:
        if Zoo(storage).read_index(key=required_key()).has(reference):
            if storage == builtin_storage():
                return BUILTIN
            # The file is for other folders too.
            return storage.address if storage.is_remote else str(Path(storage.address).absolute())
    return None
