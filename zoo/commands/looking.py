"""list, show, verify: nothing is changed."""

import json
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markdown import Markdown
from rich.table import Table

from predictors.units import MIB
from zoo.catalogue import Zoo
from zoo.commands.telling import figure, report, summary
from zoo.config import ListConfig, ShowConfig, VerifyConfig
from zoo.entry import CARD, Entry, strangers
from zoo.errors import DamagedError
from zoo.index import Reference
from zoo.load import find, zoos
from zoo.locations import configured_storages

WIDE = 160
"""Characters."""


def list_entries(config: ListConfig) -> dict[str, Any]:
    """One line per entry, the best first; an entry that two zoos hold is listed for both."""
    named = configured_storages(config.zoo)
    asked = ([] if config.zoo else zoos()) + [Zoo(place) for place in named]
    rows = [
        summary(entry)
        for zoo in asked
        for entry in entries(zoo, required=zoo.storage in named)
        if wanted(entry, config)
    ]
    rows.sort(key=lambda row: -number(row["metrics"].get(config.metric)))
    if config.json:
        report(json.dumps({"entries": rows}, indent=2))
    elif rows:
        # Names are for copying: lines of a file are as long as they need to be.
        console = Console()
        wide = console if console.is_terminal else Console(width=WIDE)
        wide.print(entries_table(rows, config.metric))
    else:
        places = " and ".join(zoo.storage.address for zoo in asked)
        report(f"no such entries in {places}")
        report("python -m train makes one; python -m zoo pull NAME zoo=ADDRESS gets one")
    return {"entries": rows}


def entries(zoo: Zoo, *, required: bool) -> Iterator[Entry]:
    """The newest version of everything that the zoo lists."""
    for name in zoo.index(required=required).entries:
        yield zoo.open(Reference(name))


def wanted(entry: Entry, config: ListConfig) -> bool:
    """Whether the filters let it through."""
    manifest = entry.manifest
    if config.predictor is not None and manifest.kind != config.predictor:
        return False
    if config.model is not None:
        names = (manifest.name.partition("/")[0], manifest.model.model_id.lower())
        pattern = config.model.lower()
        if not any(fnmatch(one, pattern) or pattern in one for one in names):
            return False
    value = manifest.metrics.get(config.metric)
    return config.least is None or number(value) >= config.least


def number(value: Any) -> float:
    """For comparing: what was not measured comes last."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number else float("-inf")


def entries_table(rows: list[dict[str, Any]], metric: str) -> Table:
    """Name, kind, the figures asked for, size and the beginning of the digest."""
    table = Table(box=None)
    metrics = list(dict.fromkeys((metric, "accuracy", "good_pred")))
    for column in ("name", "kind", *metrics, "size", "digest"):
        table.add_column(column, no_wrap=True)
    for row in rows:
        table.add_row(
            row["name"],
            row["kind"],
            *(figure(row["metrics"].get(one)) for one in metrics),
            f"{row['size'] / MIB:.1f} MiB",
            row["digest"][:12],
        )
    return table


def show(config: ShowConfig) -> dict[str, Any]:
    """The card, and what the manifest says."""
    entry = find(config.name)
    manifest = entry.manifest
    if config.json:
        report(json.dumps(manifest.model_dump(mode="json"), indent=2))
        return {"manifest": manifest.model_dump(mode="json"), **summary(entry)}
    console = Console()
    if CARD in manifest.files:
        _, _, body = entry.read(CARD).decode().partition("\n---\n")
        console.print(Markdown(body))
    table = Table(box=None, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    fields: dict[str, Any] = {
        "digest": manifest.digest,
        "found in": entry.where,
        "signed": "yes" if entry.signature() is not None else "no",
        "trace": manifest.trace_digest or "none",
        "made": f"{manifest.created}, version {manifest.code_version}",
        "files": f"{len(manifest.files)}, {manifest.size / MIB:.1f} MiB",
    }
    for name, value in fields.items():
        table.add_row(name, str(value))
    console.print(table)
    return {"manifest": manifest.model_dump(mode="json"), **summary(entry)}


def verify(config: VerifyConfig) -> dict[str, Any]:
    """Every file read and compared; what the manifest does not name is an error in a folder."""
    entry = find(config.name)
    entry.verify()
    if Path(entry.where, "manifest.json").is_file():
        extra = strangers(Path(entry.where), entry.manifest)
        if extra:
            raise DamagedError(
                f"{entry.where} holds files that its manifest does not name: {extra}"
            )
    if config.require_signature is not None:
        from zoo.signing import check_signature

        check_signature(entry, key=config.require_signature)
    files = entry.manifest.files
    signed = "" if config.require_signature is None else f", signed by {config.require_signature}"
    report(
        f"{entry.manifest.name}: {len(files)} files, {entry.manifest.size:,} bytes, all as "
        f"promised{signed}"
    )
    return {"verified": True, **summary(entry)}
