"""The command pull: copies entries into the user's zoo."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from zoo.catalog import Zoo
from zoo.commands import print_line, summarize
from zoo.config import PullConfig
from zoo.entry import ZooEntry, write_folder
from zoo.errors import ZooError
from zoo.index import PREFIX, EntryReference, ZooIndex, parse_reference
from zoo.load import required_key
from zoo.locations import builtin_storage, cache_storage, configured_storages
from zoo.lockfile import read_lockfile
from zoo.manifest import name_entry
from zoo.pull import PullCache, ReportProgress, pull_entry
from zoo.rollback_protection import read_fresh_index
from zoo.signing import check_signature


def pull(config: PullConfig, *, bundle: Sequence[str] = ()) -> dict[str, Any]:
    """Copies entries into the user's zoo, from which they load without a network.

    A model as the name means its entries of the kinds in `bundle`, all of them or none.
    """
    entries = pull_entries(config, bundle=bundle)
    for entry in entries:
        print_line(f"pulled {entry.manifest.name}@{entry.manifest.digest[:12]} into {entry.where}")
    if config.output is not None:
        print_line(f"written as a folder: {config.output}")
    summaries = [asdict(summarize(entry)) for entry in entries]
    return {"pulled": summaries, "into": cache_storage().address}


def pull_entries(config: PullConfig, *, bundle: Sequence[str] = ()) -> list[ZooEntry]:
    """Pulls the entries that a configuration names; shows progress on a terminal."""
    key = config.require_signature or required_key()
    indexes = read_indexes(config, key=key)
    chosen_entries = choose_entries(config, indexes, bundle=bundle)
    if config.output is not None and len(chosen_entries) != 1:
        names = ", ".join(chosen.name for chosen in chosen_entries)
        raise ZooError(f"output={config.output} is for one entry: pull each by its name ({names})")
    cache = PullCache(cache_storage())
    builtin = builtin_storage().canonical_address
    entries = []
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
    with Progress(
        *columns, TransferSpeedColumn(), console=console, disable=not console.is_terminal
    ) as bars:
        for chosen in chosen_entries:
            zoo, name, digest = chosen.zoo, chosen.name, chosen.digest
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
                alias=chosen.alias,
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


@dataclass(frozen=True)
class ChosenEntry:
    """A version to pull, and the zoo to pull it from."""

    zoo: Zoo
    name: str
    digest: str
    alias: str | None = None
    """The name by which it was asked for, which it keeps."""


def choose_entries(
    config: PullConfig, indexes: dict[Zoo, ZooIndex], *, bundle: Sequence[str]
) -> list[ChosenEntry]:
    """Returns every entry to pull; ZooError if no zoo has one of them."""
    if config.all:
        # The latest of each comes last, so that it is the latest here too.
        return [
            ChosenEntry(zoo, name, digest)
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
        references = parse_names(config.name, bundle)
    require_bundle(references, indexes)
    chosen = []
    for reference in references:
        holders = [zoo for zoo, index in indexes.items() if index.match(reference)]
        zoo = holders[0] if holders else next(iter(indexes))
        index = indexes[zoo]
        digest = index.resolve(reference)
        chosen.append(ChosenEntry(zoo, reference.name, digest, index.find_alias(reference)))
    return chosen


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


def require_bundle(references: Sequence[EntryReference], indexes: dict[Zoo, ZooIndex]) -> None:
    """Raises ZooError if the zoos have some of several entries, and not all."""
    listed = [
        reference
        for reference in references
        if any(reference.name in index.entries for index in indexes.values())
    ]
    missing = [reference.name for reference in references if reference not in listed]
    if listed and missing:
        zoos = " and ".join(zoo.storage.address for zoo in indexes)
        raise ZooError(
            f"{zoos} has no {', '.join(missing)}; one entry is pulled by its name: moecast zoo "
            f"pull {listed[0].name}"
        )


def add_bar(progress: Progress, name: str, total: int) -> ReportProgress:
    task = progress.add_task(name, total=total)
    return lambda arrived: progress.advance(task, arrived)
