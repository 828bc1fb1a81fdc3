"""The command pull: copies entries from other zoos into the user's."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from zoo.catalog import Zoo
from zoo.commands.format import print_line, summarize
from zoo.commands.lock import read_lockfile
from zoo.config import PullConfig
from zoo.entry import ZooEntry, write_folder
from zoo.errors import ZooError
from zoo.index import EntryReference, ZooIndex, parse_reference
from zoo.locations import cache_storage, configured_storages
from zoo.pull import PullCache, ReportProgress, pull_entry
from zoo.rollback_protection import read_fresh_index


def pull(config: PullConfig) -> dict[str, Any]:
    """Copies entries into the user's zoo, from which they load without a network."""
    indexes = read_indexes(config)
    cache = PullCache(cache_storage())
    entries = []
    with open_progress() as progress:
        for zoo, name, digest in choose_entries(config, indexes):
            entry = pull_entry(
                zoo,
                name,
                digest,
                indexes[zoo].version(name, digest),
                cache=cache,
                check=lambda entry: require_signature(entry, config.require_signature),
                progress=lambda total, name=name: add_bar(progress, name, total),  # type: ignore[misc]
            )
            entries.append(entry)
    for entry in entries:
        print_line(f"pulled {entry.manifest.name}@{entry.manifest.digest[:12]} into {entry.where}")
    if config.output is not None:
        (entry,) = entries
        files = {path: entry.read(path) for path in entry.manifest.files}
        write_folder(config.output, entry.manifest, files, entry.read_signature())
        print_line(f"written as a folder: {config.output}")
    summaries = [asdict(summarize(entry)) for entry in entries]
    return {"pulled": summaries, "into": cache.storage.address}


def read_indexes(config: PullConfig) -> dict[Zoo, ZooIndex]:
    """Reads the indexes of the zoos to pull from."""
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
    return {zoo: read_fresh_index(zoo, accept_rollback=config.accept_rollback) for zoo in zoos}


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


def require_signature(entry: ZooEntry, key: Path | None) -> None:
    """Raises SignatureError unless the entry is signed with the key, if one is given."""
    if key is not None:
        from zoo.signing import check_signature

        check_signature(entry, key=key)


@contextmanager
def open_progress() -> Iterator[Progress]:
    """Shows a bar for each entry on a terminal, and nothing elsewhere."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
    )
    console = Console(stderr=True)
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        yield progress


def add_bar(progress: Progress, name: str, total: int) -> ReportProgress:
    """Adds a bar; returns the function that advances it."""
    task = progress.add_task(name, total=total)
    return lambda arrived: progress.advance(task, arrived)
