"""push, sign, index, rm, gc: what changes a zoo."""

from pathlib import Path
from typing import Any

from zoo.commands.telling import report, summary
from zoo.config import (
    CollectGarbageConfig,
    IndexConfig,
    PushConfig,
    RemoveConfig,
    SignConfig,
)
from zoo.entry import MANIFEST, Entry, open_entry, strangers
from zoo.errors import ZooError
from zoo.index import ALIAS, LATEST, PREFIX, parse_reference
from zoo.locations import cache_storage, open_writable_storage
from zoo.publish import check_publishable
from zoo.pulling import PARTIAL
from zoo.storage import FolderStorage
from zoo.writing import WritableZoo


def push(config: PushConfig) -> dict[str, Any]:
    """Publishes an entry that has all that others need to trust it."""
    if config.alias is not None:
        taken = config.alias == LATEST or PREFIX.fullmatch(config.alias)
        if taken or not ALIAS.fullmatch(config.alias):
            raise ZooError(f"alias={config.alias}: small letters first, not latest, not a digest")
    target = writable_zoo(config.to)
    entry = publishable(config.path)
    digest = target.add(entry, replace=config.replace, alias=config.alias)
    report(f"published {entry.manifest.name}@{digest[:12]} in {target.storage.address}")
    return {"published": summary(entry), "in": target.storage.address}


def writable_zoo(where: str | None) -> WritableZoo:
    """Opens a zoo to be changed; default: that of the pulled entries."""
    return WritableZoo(open_writable_storage(where) if where else cache_storage())


def publishable(folder: Path) -> Entry:
    """The entry in a folder, when others can be offered it; ZooError, RefusedError otherwise."""
    entry = open_entry(folder)
    extra = strangers(folder, entry.manifest)
    if extra:
        raise ZooError(f"{folder} holds files that its manifest does not name: {extra}")
    check_publishable(entry)
    return entry


def index(config: IndexConfig) -> dict[str, Any]:
    """A zoo from a folder of entries: static files that any web server can hand out."""
    if not config.path.is_dir():
        raise ZooError(f"{config.path} is not a folder")
    folders = sorted(one.parent for one in config.path.rglob(MANIFEST))
    output = config.output or config.path
    zoo = WritableZoo(FolderStorage(output))
    if not folders and not zoo.index().entries:
        raise ZooError(f"{config.path} holds no entry; python -m train writes entries")
    # Of two versions the one made later is the latest.
    entries = sorted(map(publishable, folders), key=lambda one: one.manifest.created)
    for entry in entries:
        zoo.add(entry)
    made = zoo.renew(expires_days=config.expires_days)
    until = "" if made.expires is None else f", until {made.expires:%Y-%m-%d %H:%M} UTC"
    report(f"{output}: {len(made.entries)} entries, serial {made.serial}{until}")
    report(f"serve it: python -m http.server --bind 127.0.0.1 --directory {output} 8000")
    return {
        "zoo": str(output),
        "serial": made.serial,
        "expires": None if made.expires is None else made.expires.isoformat(),
        "entries": {name: listing.latest for name, listing in made.entries.items()},
    }


def sign(config: SignConfig) -> dict[str, Any]:
    """Signs an entry's folder; `push` takes the signature along."""
    from zoo.signing import sign as sign_folder

    signature = sign_folder(config.path, key=config.key)
    report(f"signed {config.path}: {signature}")
    return {"signed": str(config.path), "signature": str(signature)}


def remove(config: RemoveConfig) -> dict[str, Any]:
    """Takes an entry, or one version of it, out of a zoo; `gc` frees its bytes."""
    zoo = (
        WritableZoo(open_writable_storage(config.zoo))
        if config.zoo
        else WritableZoo(cache_storage())
    )
    reference = parse_reference(config.name)
    gone = zoo.remove(reference)
    where = zoo.storage.address
    report(f"removed {reference.name}: {', '.join(one[:12] for one in gone)} from {where}")
    report("python -m zoo gc frees the bytes")
    return {"removed": {reference.name: gone}, "zoo": where}


def collect_garbage(config: CollectGarbageConfig) -> dict[str, Any]:
    """Removes what no entry names, and downloads that were never completed."""
    zoo = (
        WritableZoo(open_writable_storage(config.zoo))
        if config.zoo
        else WritableZoo(cache_storage())
    )
    removed = zoo.prune()
    partial = 0
    if isinstance(zoo.storage, FolderStorage):
        for one in (zoo.storage.folder / PARTIAL).glob("*"):
            one.unlink(missing_ok=True)
            partial += 1
    report(
        f"{zoo.storage.address}: {len(removed)} files and {partial} unfinished downloads removed"
    )
    return {"removed": removed, "partial": partial}
