"""The zoo's command faces: each prints for people and returns the same as plain values."""

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from zoo.config import ListConfig, PullConfig, PushConfig, ShowConfig, VerifyConfig
from zoo.entry import Entry, open_entry, strangers
from zoo.errors import DamagedError, ZooError
from zoo.index import Reference, WritableZoo, Zoo, parse_reference
from zoo.load import find, zoos
from zoo.places import folder_place, local
from zoo.publish import check_publishable


def list_entries(config: ListConfig) -> dict[str, Any]:
    """One line per entry; an entry that two zoos hold is listed for both."""
    asked = [Zoo(folder_place(config.from_))] if config.from_ else zoos()
    table = Table(box=None)
    for column in ("name", "kind", "accuracy", "good_pred", "size", "digest"):
        table.add_column(column, overflow="fold")
    rows = []
    for zoo in asked:
        for name in zoo.index(required=config.from_ is not None).entries:
            entry = zoo.open(Reference(name))
            row = summary(entry)
            rows.append(row)
            table.add_row(
                name,
                row["kind"],
                figure(row["metrics"].get("accuracy")),
                figure(row["metrics"].get("good_pred")),
                f"{row['size'] / 2**20:.1f} MiB",
                row["digest"][:12],
            )
    if rows:
        Console().print(table)
    else:
        report(f"no entries in {' and '.join(zoo.place.where for zoo in asked)}")
        report("python -m train makes one; python -m zoo pull NAME from=FOLDER gets one")
    return {"entries": rows}


def show(config: ShowConfig) -> dict[str, Any]:
    """Manifest and figures of one entry."""
    entry = find(config.name)
    manifest = entry.manifest
    table = Table(box=None, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    fields: dict[str, Any] = {
        "name": manifest.name,
        "digest": manifest.digest,
        "found in": entry.where,
        "kind": manifest.kind,
        "model": manifest.model.model_id,
        "revision": manifest.model.revision,
        "shape": f"{manifest.model.num_layers} layers, {manifest.model.num_experts} experts, "
        f"top_k {manifest.model.top_k}, hidden {manifest.model.hidden_size}, "
        f"{manifest.model.dtype}",
        "signals": ", ".join(manifest.signals),
        "licence": manifest.licence,
        "trace": manifest.trace_digest or "none",
        "made": f"{manifest.created}, version {manifest.code_version}",
        **{f"held-out {name}": figure(value) for name, value in manifest.metrics.items()},
        **{f"export {name}": figure(value) for name, value in manifest.parity.items()},
        "files": f"{len(manifest.files)}, {manifest.size / 2**20:.1f} MiB",
    }
    for name, value in fields.items():
        table.add_row(name, str(value))
    Console().print(table)
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
    files = entry.manifest.files
    report(
        f"{entry.manifest.name}: {len(files)} files, {entry.manifest.size:,} bytes, all as promised"
    )
    return {"verified": True, **summary(entry)}


def pull(config: PullConfig) -> dict[str, Any]:
    """Copies one entry into the user's zoo; from then on no other place is needed for it."""
    source = Zoo(folder_place(config.from_))
    source.index(required=True)
    entry = source.open(parse_reference(config.name))
    target = WritableZoo(local())
    digest = target.add(entry)
    report(f"pulled {entry.manifest.name}@{digest[:12]} into {target.place.where}")
    return {"pulled": summary(entry), "into": target.place.where}


def push(config: PushConfig) -> dict[str, Any]:
    """Publishes an entry that has all that others need to trust it."""
    entry = open_entry(config.path)
    extra = strangers(config.path, entry.manifest)
    if extra:
        raise ZooError(f"{config.path} holds files that its manifest does not name: {extra}")
    check_publishable(entry)
    target = WritableZoo(folder_place(config.to) if config.to else local())
    digest = target.add(entry, replace=config.replace)
    report(f"published {entry.manifest.name}@{digest[:12]} in {target.place.where}")
    return {"published": summary(entry), "in": target.place.where}


def summary(entry: Entry) -> dict[str, Any]:
    """What a list says of an entry."""
    manifest = entry.manifest
    return {
        "name": manifest.name,
        "digest": manifest.digest,
        "kind": manifest.kind,
        "model": manifest.model.model_id,
        "metrics": manifest.metrics,
        "size": manifest.size,
        "where": entry.where,
    }


def figure(value: Any) -> str:
    if value is None:
        return "not measured"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def report(line: str) -> None:
    """One line, never wrapped or coloured: paths in it can be copied."""
    Console().print(line, markup=False, highlight=False, soft_wrap=True)
