"""pull and lock: entries from other zoos, and the same ones again later."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from zoo.catalogue import Zoo
from zoo.commands.telling import report, summary
from zoo.config import LockConfig, PullConfig
from zoo.entry import Entry, write_folder
from zoo.errors import ZooError
from zoo.freshness import fresh_index
from zoo.index import Index, Reference, parse_reference
from zoo.load import find
from zoo.locations import builtin_storage, cache_storage, configured_storages
from zoo.pins import Pin, Pins, read_pins, write_pins
from zoo.pulling import Cache
from zoo.pulling import Progress as Told
from zoo.pulling import pull as pull_entry


def pull(config: PullConfig) -> dict[str, Any]:
    """Copies entries into the user's zoo; from then on no other place is needed for them."""
    sources = indexed(config)
    entries = []
    with shown() as progress:
        for zoo, name, digest in chosen(config, sources):
            version = sources[zoo].entries[name].versions[digest]
            entry = pull_entry(
                zoo,
                name,
                digest,
                version,
                cache=Cache(cache_storage()),
                checked=lambda one: signature_wanted(one, config.require_signature),
                progress=lambda total, name=name: bar(progress, name, total),  # type: ignore[misc]
            )
            entries.append(entry)
    for entry in entries:
        report(f"pulled {entry.manifest.name}@{entry.manifest.digest[:12]} into {entry.where}")
    if config.output is not None:
        (entry,) = entries
        files = {path: entry.read(path) for path in entry.manifest.files}
        write_folder(config.output, entry.manifest, files, entry.signature())
        report(f"written as a folder: {config.output}")
    return {"pulled": [summary(entry) for entry in entries], "into": cache_storage().address}


def indexed(config: PullConfig) -> dict[Zoo, Index]:
    """The zoos to look in and what each lists."""
    places = configured_storages(config.zoo)
    if not places and config.locked is not None:
        pins = read_pins(config.locked).entries.values()
        places = configured_storages(",".join(dict.fromkeys(pin.zoo for pin in pins)))
    if not places:
        raise ZooError(
            "pull from where? zoo=ADDRESS (a folder, builtin, https://, s3://, hf://OWNER/REPO), "
            "or set MOECAST_ZOO"
        )
    return {
        Zoo(place): fresh_index(Zoo(place), accept_rollback=config.accept_rollback)
        for place in places
    }


def chosen(config: PullConfig, sources: dict[Zoo, Index]) -> list[tuple[Zoo, str, str]]:
    """Zoo, name and digest of everything that is asked for.

    Raises:
        ZooError: an entry that none of the zoos has.
    """
    if config.all:
        # The latest of each comes last, so that it is the latest here too.
        return [
            (zoo, name, digest)
            for zoo, index in sources.items()
            for name, listing in index.entries.items()
            for digest in sorted(listing.versions, key=lambda one: one == listing.latest)
        ]
    if config.locked is not None:
        references = [
            Reference(name, pin.digest) for name, pin in read_pins(config.locked).entries.items()
        ]
    else:
        assert config.name is not None
        references = [parse_reference(config.name)]
    found = []
    for reference in references:
        holders = [zoo for zoo, index in sources.items() if reference.matches(index)]
        zoo = holders[0] if holders else next(iter(sources))
        found.append((zoo, reference.name, zoo.resolve(reference, sources[zoo])))
    return found


def signature_wanted(entry: Entry, key: Path | None) -> None:
    """Raises unless the entry has the signature that is required of it."""
    if key is not None:
        from zoo.signing import check_signature

        check_signature(entry, key=key)


def lock(config: LockConfig) -> dict[str, Any]:
    """Writes down which digest each name has now."""
    names = config.names or list(Zoo(cache_storage()).index().entries)
    if not names:
        raise ZooError("nothing was pulled yet; name entries: python -m zoo lock names=[NAME,...]")
    pins = {}
    for one in names:
        entry = find(one)
        # What was pulled is in the cache; whoever uses the lock file needs where it came from.
        where = origin(entry)
        pins[entry.manifest.name] = Pin(digest=entry.manifest.digest, zoo=where)
    write_pins(config.output, Pins(entries=pins))
    for name, pin in pins.items():
        report(f"{name}@{pin.digest[:12]} from {pin.zoo}")
    report(f"written: {config.output}; python -m zoo pull locked={config.output}")
    return {"entries": {name: pin.model_dump() for name, pin in pins.items()}}


def origin(entry: Entry) -> str:
    """The first place that lists the entry: built in, one of MOECAST_ZOO, or where it lies."""
    reference = Reference(entry.manifest.name, entry.manifest.digest)
    if Zoo(builtin_storage()).holds(reference):
        return "builtin"
    for place in configured_storages():
        if Zoo(place).holds(reference):
            return place.address
    return entry.where


@contextmanager
def shown() -> Iterator[Progress]:
    """A bar for each entry on a terminal, nothing elsewhere: the lines that follow say it all."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
    )
    console = Console(stderr=True)
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        yield progress


def bar(progress: Progress, name: str, total: int) -> Told:
    """A new bar, and the function that moves it."""
    task = progress.add_task(name, total=total)
    return lambda arrived: progress.advance(task, arrived)
