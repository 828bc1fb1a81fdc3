"""The commands push, promote, sign, rm and gc: they change a zoo."""

from pathlib import Path
from typing import Any

from predictors.registry import find_run_entries
from predictors.table import write_value
from zoo.card import check_card
from zoo.catalog import WritableZoo
from zoo.commands import print_line, summarize
from zoo.comparison import describe_traces, pair_figures, require_same_model
from zoo.config import CollectGarbageConfig, PromoteConfig, PushConfig, RemoveConfig, SignConfig
from zoo.entry import CARD, MANIFEST, METRICS, ZooEntry, open_entry
from zoo.errors import RefusedError, ZooError
from zoo.index import check_alias, parse_reference
from zoo.signing import sign_folder
from zoo.storage import cache_storage, open_writable_storage


def open_writable_zoo(where: str | None, *, key: Path | None = None) -> WritableZoo:
    """Opens a zoo to be changed, its index signed with `key`; default: the pulled entries."""
    return WritableZoo(open_writable_storage(where) if where else cache_storage(), key)


def push(config: PushConfig) -> dict[str, Any]:
    """Publishes entries that have everything that others need to trust them.

    None is published if one of them cannot be.
    """
    if config.alias is not None:
        check_alias(config.alias)
    zoo = open_writable_zoo(config.zoo, key=config.key)
    where = zoo.storage.address
    entries = [check_publishable(open_entry(one)) for one in find_entry_folders(config.path)]
    # Of two versions, the one made later becomes the latest.
    entries.sort(key=lambda entry: entry.manifest.created)
    zoo.add(*entries, alias=config.alias)
    for manifest in (entry.manifest for entry in entries):
        print_line(f"published {manifest.name}@{manifest.digest[:12]} in {where}")
    return {"published": [summarize(entry) for entry in entries], "in": where}


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


def check_publishable(entry: ZooEntry) -> ZooEntry:
    """Returns the entry, every byte checked; RefusedError lists everything that is missing."""
    manifest = entry.manifest
    entry.verify()
    missing = []
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
    return entry


def promote(config: PromoteConfig) -> dict[str, Any]:
    """Makes an alias name a version; RefusedError, with the figures, if a metric falls too far."""
    reference, alias = parse_reference(config.name), check_alias(config.alias)
    zoo = open_writable_zoo(config.zoo, key=config.key)

    def check(entry: ZooEntry, now: ZooEntry | None) -> None:
        entry.verify()
        if now is not None:
            check_metrics(entry, now, config)

    entry, earlier = zoo.move_alias(reference, alias, check=check)
    where, digest = zoo.storage.address, entry.manifest.digest
    before = "" if earlier is None else f", before {earlier.manifest.digest[:12]}"
    print_line(f"{reference.name}@{alias} is {digest[:12]} in {where}{before}")
    if earlier is not None and (note := describe_traces(earlier, entry)):
        print_line(note)
    return {
        "alias": alias,
        "promoted": summarize(entry),
        "before": None if earlier is None else summarize(earlier),
        "in": where,
    }


def check_metrics(entry: ZooEntry, now: ZooEntry, config: PromoteConfig) -> None:
    """Raises RefusedError that lists the metrics which are lower by more than `max_drop`."""
    require_same_model(now, entry)
    fallen = [
        f"{pair.name} {'not measured' if pair.second is None else write_value(pair.second)}, "
        f"was {write_value(pair.first)}"
        for pair in pair_figures(now.manifest.metrics, entry.manifest.metrics)
        if pair.has_fallen(config.max_drop)
    ]
    if fallen:
        versions = [f"{one.manifest.name}@{one.manifest.digest[:12]}" for one in (now, entry)]
        listed = " ".join(locate_version(version, config.zoo) for version in versions)
        raise RefusedError(
            f"{versions[1]} does not become {config.alias}, which is {versions[0]}: lower by more "
            f"than max_drop={config.max_drop:g}: {'; '.join(fallen)}. All figures: moecast zoo "
            f"compare {listed}"
        )


def locate_version(version: str, zoo: str | None) -> str:
    """Returns the reference by which any command finds a version of the zoo."""
    if zoo is None or zoo == "builtin":
        return version
    return f"{zoo}#{version}" if "://" in zoo else f"file://{zoo}#{version}"


def sign(config: SignConfig) -> dict[str, Any]:
    """Signs an entry's folder; `push` publishes the signature too."""
    signature = sign_folder(config.path, key=config.key)
    print_line(f"signed {config.path}: {signature}")
    return {"signed": str(config.path), "signature": str(signature)}


def remove(config: RemoveConfig) -> dict[str, Any]:
    """Removes an entry, or one version of it, from a zoo; `gc` frees its bytes."""
    zoo = open_writable_zoo(config.zoo, key=config.key)
    reference = parse_reference(config.name)
    digests = zoo.remove(reference, entirely="@" not in config.name)
    shown = ", ".join(digest[:12] for digest in digests)
    print_line(f"removed {reference.name}: {shown} from {zoo.storage.address}")
    print_line("moecast zoo gc frees the bytes")
    return {"removed": {reference.name: digests}, "zoo": zoo.storage.address}


def collect_garbage(config: CollectGarbageConfig) -> dict[str, Any]:
    """Removes the blobs that no entry references, and incomplete files."""
    zoo = open_writable_zoo(config.zoo)
    removed, incomplete = zoo.prune(), zoo.remove_incomplete()
    print_line(
        f"{zoo.storage.address}: {len(removed)} files and {incomplete} incomplete ones removed"
    )
    return {"removed": removed, "incomplete": incomplete}
