"""The commands push, sign, index, rm and gc: they change a zoo."""

import logging
from dataclasses import asdict
from pathlib import Path
from typing import Any

from predictors.run_folder import find_run_entries
from predictors.terminal import escape_controls
from zoo.card import check_card
from zoo.catalog import WritableZoo
from zoo.commands import print_line, summarize
from zoo.config import (
    CollectGarbageConfig,
    IndexConfig,
    PushConfig,
    RemoveConfig,
    SignConfig,
)
from zoo.entry import CARD, MANIFEST, METRICS, ZooEntry, open_entry, require_tracked_files
from zoo.errors import DamagedError, RefusedError, ZooError
from zoo.index import check_alias, parse_reference
from zoo.locations import cache_storage, open_writable_storage
from zoo.pull import PARTIAL
from zoo.signing import sign_folder
from zoo.storage import FolderStorage

log = logging.getLogger(__name__)


def push(config: PushConfig) -> dict[str, Any]:
    """Publishes entries that have everything that others need to trust them."""
    if config.alias is not None:
        check_alias(config.alias)
    target = open_writable_zoo(config.zoo, key=config.key)
    # All are checked before the first is published.
    entries = [open_publishable(folder) for folder in find_entry_folders(config.path)]
    for entry in entries:
        digest = target.add(entry, replace=config.replace, alias=config.alias)
        print_line(f"published {entry.manifest.name}@{digest[:12]} in {target.storage.address}")
    return {
        "published": [asdict(summarize(entry)) for entry in entries],
        "in": target.storage.address,
    }


def find_entry_folders(path: Path) -> list[Path]:
    """Returns the entries' folders: the path itself, those in it, or those of a training run.

    Raises PredictorError if it is a run without entries. Of any other folder without entries, the
    path itself is returned: `open_entry` says what is missing.
    """
    if (path / MANIFEST).is_file():
        return [path]
    folders = [file.parent for file in path.glob(f"*/{MANIFEST}")]
    if not folders and (entries := find_run_entries(path)) is not None:
        folders = [file.parent for file in entries.glob(f"*/{MANIFEST}")]
    return sorted(folders) or [path]


def open_writable_zoo(where: str | None, *, key: Path | None = None) -> WritableZoo:
    """Opens a zoo to be changed, its index signed with `key`; default: the pulled entries."""
    return WritableZoo(open_writable_storage(where) if where else cache_storage(), key)


def open_publishable(folder: Path) -> ZooEntry:
    """Opens an entry's folder; RefusedError or ZooError if it cannot be published."""
    entry = open_entry(folder)
    require_tracked_files(folder, entry.manifest)
    check_publishable(entry)
    return entry


def check_publishable(entry: ZooEntry) -> None:
    """Checks every byte of an entry; RefusedError lists everything that is missing."""
    manifest = entry.manifest
    entry.verify()
    missing = []
    if CARD not in manifest.files:
        missing.append(f"a model card ({CARD})")
    else:
        try:
            check_card(entry.read(CARD), manifest)
        except ZooError as error:
            missing.append(f"a valid model card ({error})")
    if not manifest.licence.strip():
        missing.append("a licence")
    measured = [value for value in manifest.metrics.values() if isinstance(value, float | int)]
    if not measured or not entry.metrics().get("held_out"):
        missing.append(f"metrics on held-out requests ({METRICS}, key held_out)")
    records = manifest.files.items()
    if any(path.endswith(".onnx") and record.graph is None for path, record in records):
        missing.append("declared inputs and outputs of its graphs")
    if manifest.trace_digest is None:
        missing.append("the digest of its training trace")
    if missing:
        raise RefusedError(
            f"{manifest.name} in {entry.where} is not published: it lacks {'; '.join(missing)}. "
            "Entries written by `moecast train` have all of it."
        )


def index(config: IndexConfig) -> dict[str, Any]:
    """Makes a zoo of a folder of entries: static files for any web server."""
    if not config.path.is_dir():
        raise ZooError(f"{config.path} is not a folder")
    folders = sorted(path.parent for path in config.path.rglob(MANIFEST))
    output = config.output or config.path
    zoo = WritableZoo(FolderStorage(output), config.key)
    try:
        known = zoo.read_index()
    except DamagedError as error:
        log.warning("%s", escape_controls(str(error)))
        known = zoo.rebuild_index()
    if not folders and not known.entries:
        raise ZooError(f"{config.path} has no entry; moecast train writes entries")
    # Of two versions, the one made later becomes the latest.
    entries = sorted(map(open_publishable, folders), key=lambda entry: entry.manifest.created)
    for entry in entries:
        zoo.add(entry)
    renewed = zoo.renew_index(expires_days=config.expires_days)
    expires = renewed.expires
    until = "" if expires is None else f", expires {expires:%Y-%m-%d %H:%M} UTC"
    print_line(f"{output}: {len(renewed.entries)} entries, serial {renewed.serial}{until}")
    print_line(f"serve it: python -m http.server --bind 127.0.0.1 --directory {output} 8000")
    return {
        "zoo": str(output),
        "serial": renewed.serial,
        "expires": None if expires is None else expires.isoformat(),
        "entries": {name: listing.latest for name, listing in renewed.entries.items()},
    }


def sign(config: SignConfig) -> dict[str, Any]:
    """Signs an entry's folder; `push` publishes the signature too."""
    signature = sign_folder(config.path, key=config.key)
    print_line(f"signed {config.path}: {signature}")
    return {"signed": str(config.path), "signature": str(signature)}


def remove(config: RemoveConfig) -> dict[str, Any]:
    """Removes an entry, or one version of it, from a zoo; `gc` frees its bytes."""
    zoo = open_writable_zoo(config.zoo, key=config.key)
    reference = parse_reference(config.name)
    digests = zoo.remove(reference)
    shown = ", ".join(digest[:12] for digest in digests)
    print_line(f"removed {reference.name}: {shown} from {zoo.storage.address}")
    print_line("moecast zoo gc frees the bytes")
    return {"removed": {reference.name: digests}, "zoo": zoo.storage.address}


def collect_garbage(config: CollectGarbageConfig) -> dict[str, Any]:
    """Removes the blobs that no entry references, and incomplete downloads."""
    zoo = open_writable_zoo(config.zoo)
    removed = zoo.prune()
    partial = 0
    if isinstance(zoo.storage, FolderStorage):
        with zoo.storage.removing_blobs():
            for path in (zoo.storage.folder / PARTIAL).glob("*"):
                path.unlink(missing_ok=True)
                partial += 1
    print_line(
        f"{zoo.storage.address}: {len(removed)} files and {partial} incomplete downloads removed"
    )
    return {"removed": removed, "partial": partial}
