"""The commands list, show, verify and compare: they only read."""

import json
import logging
from collections.abc import Sequence
from fnmatch import fnmatch
from typing import Any

from rich.console import Console

from predictors.errors import unknown
from predictors.table import Table, TableColumn, escape_controls
from predictors.units import MIB
from zoo.catalog import Zoo
from zoo.commands import print_line, summarize
from zoo.comparison import (
    COMPARED,
    MetricPair,
    describe_traces,
    pair_figures,
    require_same_model,
)
from zoo.config import CompareConfig, EntryConfig, ListConfig, VerifyEntryConfig
from zoo.entry import CARD, ZooEntry
from zoo.errors import ZooError
from zoo.load import find_entry, local_zoos
from zoo.manifest import EntryManifest, is_number
from zoo.signing import check_signature
from zoo.storage import configured_storages

log = logging.getLogger(__name__)

JSON = "json=true prints them"
METRICS = ("accuracy", "good_pred")
"""Columns of every list."""


def list_entries(config: ListConfig) -> dict[str, Any]:
    """Lists entries, the best first; an entry that two zoos have is listed for both.

    An entry that cannot be read is left out with a warning; so is a zoo, unless `zoo` names it.
    Raises ZooError for a metric that no entry has.
    """
    configured = [Zoo(storage) for storage in configured_storages(config.zoo)]
    zoos = configured if config.zoo else [*local_zoos(), *configured]
    rows: list[dict[str, Any]] = []
    unreadable: list[str] = []
    for zoo in zoos:
        try:
            index = zoo.read_index(required=zoo in configured)
            entries = {
                name: zoo.open_readable(listing.latest, name=name)
                for name, listing in index.entries.items()
            }
        except ZooError as error:
            if config.zoo:
                raise
            log.warning("%s", escape_controls(str(error)))
            continue
        for name, entry in entries.items():
            if entry is None:
                unreadable.append(name)
            elif config.model is None or is_of_model(entry.manifest, config.model.lower()):
                rows.append(summarize(entry))
    known = {*METRICS, *(name for row in rows for name in row["metrics"])}
    if rows and config.metric not in known:
        raise ZooError(f"metric: {unknown('metric', config.metric, known)}")
    rows.sort(key=lambda row: -sort_value(row["metrics"].get(config.metric)))
    listed = {"entries": rows, "unreadable": unreadable}
    if config.json:
        print_line(json.dumps(listed, indent=2))
    elif rows:
        entries_table(rows, config.metric).print(Console())
    else:
        addresses = " and ".join(zoo.storage.address for zoo in zoos)
        print_line(f"no such entries in {addresses}")
        print_line("moecast train makes one; moecast zoo pull NAME zoo=ADDRESS gets one")
    return listed


def is_of_model(manifest: EntryManifest, pattern: str) -> bool:
    names = (manifest.name.partition("/")[0], manifest.model.model_id.lower())
    return any(fnmatch(name, pattern) or pattern in name for name in names)


def sort_value(metric: Any) -> float:
    """Returns a metric for comparison; one that was not measured comes last."""
    # Whole numbers may be too large for a float.
    return float(max(-1e308, min(1e308, metric))) if is_number(metric) else float("-inf")


def entries_table(rows: Sequence[dict[str, Any]], metric: str) -> Table:
    def metric_column(name: str, rank: int) -> TableColumn:
        return TableColumn(name, lambda row: row["metrics"].get(name), rank=rank)

    metrics = dict.fromkeys((metric, *METRICS))
    columns = [
        TableColumn("name"),
        TableColumn("kind", rank=5),
        *(metric_column(name, rank) for rank, name in enumerate(metrics)),
        TableColumn("size", write=lambda size: f"{size / MIB:.1f} MiB", rank=3),
        TableColumn("digest", write=lambda digest: digest[:12], rank=4),
    ]
    return Table(columns=columns, rows=rows, elsewhere=JSON)


def show(config: EntryConfig) -> dict[str, Any]:
    """Prints an entry's card and a summary of its manifest."""
    entry = find_entry(config.name)
    manifest = entry.manifest
    if CARD in manifest.files:
        _, _, body = entry.read(CARD).decode(errors="replace").partition("\n---\n")
        print_line(body.strip() + "\n")
    facts = {
        "digest": manifest.digest,
        "found in": entry.where,
        "signed": entry.read_signature() is not None,
        "trace": manifest.trace_digest or "none",
        "made": f"{manifest.created}, version {manifest.code_version}",
        "files": f"{len(manifest.files)}, {manifest.size / MIB:.1f} MiB",
    }
    Table.facts(facts).print(Console())
    return {"manifest": manifest.model_dump(mode="json"), **summarize(entry)}


def verify(config: VerifyEntryConfig) -> dict[str, Any]:
    """Reads and checks every file; in a folder, a file not in the manifest is an error."""
    entry = find_entry(config.name)
    entry.verify()
    signed = ""
    if config.require_signature is not None:
        check_signature(entry, key=config.require_signature)
        signed = f", signed by {config.require_signature}"
    print_line(
        f"{entry.manifest.name}: {len(entry.manifest.files)} files, {entry.manifest.size:,} bytes, "
        f"all digests correct{signed}"
    )
    return {"verified": True, **summarize(entry)}


def compare(config: CompareConfig) -> dict[str, Any]:
    """Prints metrics, costs and layers of two entries of one model, and returns them."""
    first, second = find_entry(config.name), find_entry(config.other)
    require_same_model(first, second)
    sections = {
        heading: pair_figures(figures(first), figures(second))
        for heading, figures in COMPARED.items()
    }
    note = describe_traces(first, second)
    compared = {
        "entries": [summarize(first), summarize(second)],
        "same_trace": note is None,
        **{
            name.replace(" ", "_"): {
                pair.name: [pair.first, pair.second, pair.difference] for pair in pairs
            }
            for name, pairs in sections.items()
        },
    }
    if config.json:
        print_line(json.dumps(compared, indent=2))
        return compared
    print_line(f"A: {describe_version(first)}")
    print_line(f"B: {describe_version(second)}\n")
    for name, pairs in sections.items():
        if pairs:
            comparison_table(name, pairs).print(Console())
    if note is not None:
        print_line(note)
    return compared


def describe_version(entry: ZooEntry) -> str:
    manifest = entry.manifest
    return f"{manifest.name}@{manifest.digest[:12]}, made {manifest.created}, in {entry.where}"


def comparison_table(
    title: str, pairs: Sequence[MetricPair], names: tuple[str, str] = ("A", "B")
) -> Table:
    """Return the figures of two entries, or of one in two places, and their differences."""
    first, second = names

    def write_signed(difference: float) -> str:
        return f"{difference:+d}" if isinstance(difference, int) else f"{difference:+.4g}"

    columns = [
        TableColumn(title, lambda pair: pair.name.replace("_", " ")),
        TableColumn(first, "first"),
        TableColumn(second, "second"),
        TableColumn(f"{second} - {first}", "difference", write_signed),
    ]
    return Table(columns=columns, rows=pairs, elsewhere=JSON)
