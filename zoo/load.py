"""Loads a predictor by what a user writes after `predictor=`: a name, a folder or an address.

An entry of another zoo is pulled into the user's first: each blob once, several at a time, hashed
as they arrive.
"""

import logging
import sys
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from predictors.base import Predictor
from predictors.errors import unknown
from predictors.files import find_cache_folder
from predictors.metrics import CardAccuracy
from predictors.registry import load_from_files
from predictors.spec import ModelSpec
from predictors.table import escape_controls
from zoo.catalog import WritableZoo, Zoo
from zoo.comparison import layer_figures
from zoo.digest import HEX64
from zoo.entry import SIGNATURE, ZooEntry, open_entry
from zoo.errors import DamagedError, MismatchError, ZooError
from zoo.index import EntryReference, ZooIndex, blob_path, is_alias, parse_reference
from zoo.manifest import NAME, EntryManifest, FileRecord, name_entry
from zoo.signing import check_signature, required_key
from zoo.storage import builtin_storage, cache_storage, configured_storages, open_zoo_storage
from zoo.storage.folder import FolderStorage

log = logging.getLogger(__name__)


def local_zoos() -> list[Zoo]:
    """Returns the zoos that need no network, in the order of lookup: cache, then built-in zoo.

    A user without a home folder has no cache.
    """
    storages = [cache_storage()] if find_cache_folder() is not None else []
    return [Zoo(storage) for storage in [*storages, builtin_storage()]]


def read_local_index(zoo: Zoo) -> ZooIndex:
    """Reads a local zoo's index; warns and returns an empty one if it cannot be read.

    So a damaged cache hides neither the built-in zoo nor those of MOECAST_ZOO.
    """
    try:
        return zoo.read_index()
    except ZooError as error:
        log.warning("%s", escape_controls(str(error)))
        return ZooIndex()


def list_names() -> set[str]:
    return {name for zoo in local_zoos() for name in read_local_index(zoo).entries}


def find_name(
    predictor: str, identity: Mapping[str, str], *, model: str, spec: ModelSpec | None = None
) -> str | None:
    """Finds the local entry of this kind for a model: NAME, NAME@DIGEST or None.

    A version that was made for the model comes first, whatever its name says of the model; then one
    of a model that it is a quantisation of; then an entry that only has the model's name, so that
    loading it explains the difference. What cannot be read is left out with a warning.

    Args:
        predictor: kind of the predictor, the second part of the entry's name.
        identity: values of `ModelSpec` that name the model.
        model: name of the model; of several entries, the one with this name is preferred.
        spec: the whole model; None looks for entries of exactly this model.
    """
    own = name_entry(model, predictor)
    named: set[str] = set()
    matching: list[str] = []
    serving: list[str] = []
    for zoo in local_zoos():
        entries = read_local_index(zoo).entries
        for name, listing in entries.items():
            if name.rpartition("/")[2] != predictor:
                continue
            for digest in listing.newest_first():
                entry = zoo.open_readable(digest, name=name)
                if entry is None:
                    continue
                # What the bare name means is its latest version in the first zoo that has it.
                is_latest = digest == listing.latest and name not in named
                found = name if is_latest else f"{name}@{digest[:12]}"
                if entry.manifest.spec.identity == identity:
                    matching.append(found)
                elif spec is not None and entry.manifest.spec.serves(spec):
                    serving.append(found)
        named |= entries.keys()
    if fitting := matching or serving:
        return min(fitting, key=lambda one: one.partition("@")[0] != own)  # of equals, the first
    return own if own in named else None


def find_entry(reference: str | Path) -> ZooEntry:
    """Finds an entry by name, folder or address.

    A name (`NAME`, `NAME@latest`, `NAME@ALIAS`, `NAME@DIGEST`) is looked up in the local zoos
    without a network; if it is in none, the entry is pulled from the first zoo of MOECAST_ZOO that
    lists it. An address is `ZOO#NAME`.

    Raises:
        ZooError: there is no such entry; the message lists the choices.
        UnreachableError, DamagedError: as pulling does.
        SignatureError: MOECAST_REQUIRE_SIGNATURE is set and the entry is not signed with that key.
    """
    entry = _find_unchecked(reference)
    key = required_key()
    if key is not None and entry.where != builtin_storage().address:
        check_signature(entry, key=key)
    return entry


def _find_unchecked(reference: str | Path) -> ZooEntry:
    if isinstance(reference, str) and "://" in reference:
        return find_by_address(reference)
    named = None
    if isinstance(reference, str) and NAME.fullmatch(reference.partition("@")[0]):
        named = parse_reference(reference)
        entry = _find_local(named)
        if entry is not None:
            return entry
    try:
        is_folder = Path(reference).is_dir()
    except OSError as error:
        raise ZooError(f"{str(reference)!r:.200} is not a folder: {error.strerror}") from error
    if is_folder:
        return open_entry(reference)
    if named is not None:
        for zoo in map(Zoo, configured_storages()):
            index = zoo.read_index(key=required_key())
            if index.has(named):
                return pull_reference(zoo, named, index, keeps_names=True)
    raise ZooError(
        f"{unknown('zoo entry', str(reference), list_names())}. Or name an entry's folder; moecast "
        "zoo list shows the entries here, moecast zoo pull NAME zoo=ADDRESS gets others"
    )


def _find_local(reference: EntryReference) -> ZooEntry | None:
    """Opens the entry in a local zoo; if one has it damaged, another may have exactly its bytes."""
    known, damaged = None, None
    for zoo in local_zoos():
        index = read_local_index(zoo)
        if index.has(reference):
            reference = EntryReference(reference.name, index.resolve(reference))
            try:
                return zoo.open(reference, index)
            except DamagedError as error:
                damaged = error
        if known is None and reference.name in index.entries:
            known = index
    if damaged is not None:
        raise damaged
    if known is not None and not configured_storages():
        known.resolve(reference)  # raises, with the versions there are
    return None


def find_by_address(address: str) -> ZooEntry:
    """Finds `ZOO#NAME[@VERSION]`.

    An entry that is named by its whole digest comes from the cache if it is there; any other is
    pulled.
    """
    where, _, name = address.partition("#")
    zoo = Zoo(open_zoo_storage(where))
    if not name:
        names = zoo.read_index(required=True).entries
        raise ZooError(f"{where} is a zoo; write {where}#NAME: {', '.join([*names][:8])}")
    reference = parse_reference(name)
    if HEX64.fullmatch(reference.version):
        cached = Zoo(cache_storage())
        index = read_local_index(cached)
        if index.has(reference):
            return cached.open(reference, index)
    return pull_reference(zoo, reference, keeps_names=True)


def load_predictor(
    reference: str | Path, *, spec: ModelSpec | None, options: Mapping[str, Any] | None = None
) -> Predictor:
    """Loads a predictor from the zoo or a folder, every byte of it checked.

    `options` replace the entry's of the same names. Raises as `find_entry`, and MismatchError if
    the entry was made for another model than `spec`; None skips the check. Another dtype or a
    quantisation is the same model: its routers are the same, its hidden states differ slightly.
    """
    return load_entry(find_entry(reference), spec=spec, options=options)


def load_entry(
    entry: ZooEntry, *, spec: ModelSpec | None, options: Mapping[str, Any] | None = None
) -> Predictor:
    """Loads the predictor of an entry; otherwise as `load_predictor`."""
    manifest = entry.manifest
    made_for = manifest.spec
    if spec is not None:
        if not made_for.serves(spec):
            refuse(manifest, spec)
        if made_for != spec:
            log.info("%s", describe_transfer(manifest, spec))
        made_for = spec
    predictor = load_from_files(
        manifest.kind,
        made_for,
        files=entry.payload(),
        options={**manifest.options, **(options or {})},
    )
    predictor.card = CardAccuracy.parse(
        manifest.name, layer_figures(entry), num_layers=made_for.num_layers
    )
    return predictor


def refuse(manifest: EntryManifest, spec: ModelSpec) -> NoReturn:
    """Raises MismatchError with all that differs, and what to do about it."""
    made_for = replace(manifest.spec, dtype=spec.dtype)
    base = ""
    if made_for.differences(spec).keys() <= spec.identity.keys():
        base = made_for.describe_router_difference(spec) or (
            f"If the model is a quantisation of {made_for.model_id}, say so: "
            f"model.base={made_for.model_id}. "
        )
    made_for.require(
        spec,
        this=f"the zoo entry {manifest.name}",
        that="the model",
        error=MismatchError,
        hint=f"{base}Choose an entry made for this model (moecast zoo list), "
        "or train one: moecast train",
    )
    raise AssertionError(f"{manifest.name} serves {spec}")


def describe_transfer(manifest: EntryManifest, spec: ModelSpec) -> str:
    """Returns a line on an entry that serves another dtype or a quantisation of its model."""
    made_for, accuracy = manifest.spec, manifest.metrics.get("accuracy")
    is_same = made_for.identity == spec.identity
    states = f"{made_for.dtype} states" + ("" if is_same else f" of {made_for.model_id}")
    measured = f", held-out accuracy {accuracy:.3f}" if isinstance(accuracy, float) else ""
    model = "the model" if is_same else f"{spec.model_id}, a quantisation of it,"
    return (
        f"{manifest.name} was trained on {states}{measured}; {model} computes in {spec.dtype}: the "
        "statistics of a run have its recall here"
    )


PARALLEL = 8
"""Downloads at a time: a zoo's files are small, and most of the time is the server's latency."""


def pull_reference(
    source: Zoo,
    reference: EntryReference,
    index: ZooIndex | None = None,
    *,
    keeps_names: bool = False,
) -> ZooEntry:
    """Pulls one version, as `pull_references`; `index` is the source's, if it was read before."""
    if index is None:
        index = source.read_index(required=True, key=required_key())
    (entry,) = pull_references([(source, reference)], {source: index}, keeps_names=keeps_names)
    return entry


def pull_references(
    chosen: Iterable[tuple[Zoo, EntryReference]],
    indexes: Mapping[Zoo, ZooIndex],
    *,
    require_signature: Path | None = None,
    keeps_names: bool = False,
) -> list[ZooEntry]:
    """Returns entries from the cache, after what is missing of them was downloaded.

    Of several processes, one pulls at a time. The cache lists all of them in one step, with the
    aliases that name them: if one cannot be pulled, none.

    Args:
        chosen: versions, each with the zoo to pull it from. Of two of an entry, the later one
            becomes the latest.
        indexes: the zoos' indexes.
        require_signature: public key with which the entries must be signed; by default that of
            MOECAST_REQUIRE_SIGNATURE, except for the built-in zoo, which came with the package.
        keeps_names: an entry's latest version in the cache, and its aliases there, stay: to use a
            version once does not decide which one a name means.
    """
    aliases: dict[tuple[Zoo, EntryReference], list[str]] = {}
    for source, named in chosen:
        version = EntryReference(named.name, indexes[source].resolve(named))
        given = aliases.setdefault((source, version), [])
        if is_alias(named.version):
            given.append(named.version)
    cache, required = cache_storage(), required_key()
    with cache.changing_blobs():
        WritableZoo(cache).read_index()  # one that cannot be changed is found out first
        pulled = []
        for (source, version), given in aliases.items():
            is_trusted = source.storage == builtin_storage()
            key = require_signature or (None if is_trusted else required)
            pulled.append((download(source, version, indexes[source], cache, key=key), given))
        WritableZoo(cache).register(pulled, keeps_names=keeps_names)
    return [entry for entry, _ in pulled]


def download(
    source: Zoo, version: EntryReference, index: ZooIndex, cache: FolderStorage, *, key: Path | None
) -> ZooEntry:
    """Writes the blobs of a version that the cache lacks; returns the entry, checked."""
    name, digest = version.name, version.version
    listed, zoo = index.entries[name].versions[digest], Zoo(cache)
    is_known = cache.has_bytes(blob_path(digest), digest)
    if not is_known:
        address = escape_controls(source.storage.address)
        sys.stderr.write(f"pulling {name}@{digest[:12]} from {address}\n")
    manifest = (zoo if is_known else source).open_digest(digest, name=name).manifest
    blobs = {record.sha256: (record, path) for path, record in manifest.files.items()}
    if listed.signature is not None:
        blobs[listed.signature.sha256] = (listed.signature, SIGNATURE)
    missing = [blob for one, blob in blobs.items() if not cache.has_bytes(blob_path(one), one)]
    needed = sum(record.size for record, _ in missing)
    advice = "Free some, or set MOECAST_CACHE to a folder on another disk"
    cache.require_space(needed, name, advice=advice)
    if not is_known:
        cache.write(blob_path(digest), manifest.to_bytes())

    def fetch(record: FileRecord, path: str) -> None:
        blob, what = blob_path(record.sha256), f"{path} of {name}"
        cache.fetch(source.storage, blob, record.sha256, record.size, what=what)

    with ThreadPoolExecutor(PARALLEL) as pool:
        # The first failure cancels those that have not begun.
        list(pool.map(lambda blob: fetch(*blob), missing))
    entry = zoo.open_digest(digest, name=name, version=listed)
    entry.verify()  # also the graphs
    if key is not None:
        check_signature(entry, key=key)
    return entry
