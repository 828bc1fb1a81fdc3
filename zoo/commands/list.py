"""The commands list, show and verify: they only read."""

import json
import logging
from dataclasses import asdict
from fnmatch import fnmatch
from typing import Any

from rich.console import Console
from rich.markdown import Markdown

from predictors.table import Table, format_or_dash
from predictors.terminal import escape_controls
from zoo.catalog import Zoo
from zoo.commands import EntrySummary, print_line, summarize
from zoo.config import ListConfig, ShowConfig, VerifyEntryConfig
from zoo.entry import CARD, ZooEntry, require_tracked_files
from zoo.errors import UnreachableError, ZooError
from zoo.index import EntryReference
from zoo.load import find_entry, local_zoos, read_local_index
from zoo.locations import configured_storages
from zoo.signing import check_signature

log = logging.getLogger(__name__)

RENDERED_WIDTH = 100
"""Characters from which no value of a rendered card is cut; in less, its Markdown is shown."""


def list_entries(config: ListConfig) -> dict[str, Any]:
    """Lists entries, the best first; an entry that two zoos have is listed for both.

    An entry that cannot be read is left out with a warning.
    """
    configured = configured_storages(config.zoo)
    zoos = ([] if config.zoo else local_zoos()) + [Zoo(storage) for storage in configured]
    rows: list[EntrySummary] = []
    unreadable: list[str] = []
    for zoo in zoos:
        is_configured = zoo.storage in configured
        index = zoo.read_index(required=True) if is_configured else read_local_index(zoo)
        for name in index.entries:
            try:
                entry = zoo.open(EntryReference(name), index)
            except UnreachableError:
                raise
            except ZooError as error:
                log.warning("%s", escape_controls(str(error)))
                unreadable.append(name)
                continue
            if matches_filters(entry, config):
                rows.append(summarize(entry))
    rows.sort(key=lambda row: -sort_value(row.metrics.get(config.metric)))
    listed = {"entries": [asdict(row) for row in rows], "unreadable": unreadable}
    if config.json:
        print_line(json.dumps(listed, indent=2))
    elif rows:
        entries_table(rows, config.metric).print(Console())
    else:
        addresses = " and ".join(zoo.storage.address for zoo in zoos)
        print_line(f"no such entries in {addresses}")
        print_line("moecast train makes one; moecast zoo pull NAME zoo=ADDRESS gets one")
    return listed


def matches_filters(entry: ZooEntry, config: ListConfig) -> bool:
    manifest = entry.manifest
    if config.predictor is not None and manifest.kind != config.predictor:
        return False
    if config.model is not None:
        names = (manifest.name.partition("/")[0], manifest.model.model_id.lower())
        pattern = config.model.lower()
        if not any(fnmatch(name, pattern) or pattern in name for name in names):
            return False
    value = manifest.metrics.get(config.metric)
    return config.least is None or sort_value(value) >= config.least


def sort_value(metric: Any) -> float:
    """Returns a metric for comparison; one that was not measured comes last."""
    is_number = isinstance(metric, int | float) and not isinstance(metric, bool)
    # Whole numbers may be too large for a float.
    return float(max(-1e308, min(1e308, metric))) if is_number else float("-inf")


def entries_table(rows: list[EntrySummary], metric: str) -> Table:
    metrics = list(dict.fromkeys((metric, "accuracy", "good_pred")))
    return Table.of(
        ["name", "kind", *metrics, "size", "digest"],
        [
            [
                row.name,
                row.kind,
                *(format_or_dash(row.metrics.get(name)) for name in metrics),
                f"{row.size / 2**20:.1f} MiB",
                row.digest[:12],
            ]
            for row in rows
        ],
        importance=[*metrics, "size", "digest", "kind"],
        elsewhere="json=true prints them",
    )


def show(config: ShowConfig) -> dict[str, Any]:
    """Prints an entry's card and a summary of its manifest."""
    entry = find_entry(config.name)
    manifest = entry.manifest
    results = {"manifest": manifest.model_dump(mode="json"), **asdict(summarize(entry))}
    if config.json:
        print_line(json.dumps(results["manifest"], indent=2))
        return results
    console = Console()
    if CARD in manifest.files:
        text = escape_controls(entry.read(CARD).decode(errors="replace"))
        _, _, body = text.partition("\n---\n")
        if console.is_terminal and console.width >= RENDERED_WIDTH:
            console.print(Markdown(body, hyperlinks=False))
        else:
            print_line(body.strip() + "\n")
    fields: dict[str, Any] = {
        "digest": manifest.digest,
        "found in": entry.where,
        "signed": "yes" if entry.read_signature() is not None else "no",
        "trace": manifest.trace_digest or "none",
        "made": f"{manifest.created}, version {manifest.code_version}",
        "files": f"{len(manifest.files)}, {manifest.size / 2**20:.1f} MiB",
    }
    Table.facts(fields).print(console)
    return results


def verify(config: VerifyEntryConfig) -> dict[str, Any]:
    """Reads and checks every file; in a folder, a file not in the manifest is an error."""
    entry = find_entry(config.name)
    entry.verify()
    if entry.folder is not None:
        require_tracked_files(entry.folder, entry.manifest)
    if config.require_signature is not None:
        check_signature(entry, key=config.require_signature)
    files = entry.manifest.files
    signed = "" if config.require_signature is None else f", signed by {config.require_signature}"
    print_line(
        f"{entry.manifest.name}: {len(files)} files, {entry.manifest.size:,} bytes, all digests "
        f"correct{signed}"
    )
    return {"verified": True, **asdict(summarize(entry))}
