"""From what a user writes after `predictor=` to an entry, and to a predictor that fits a model."""

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from predictors.base import Predictor
from predictors.errors import unknown
from predictors.spec import ModelSpec
from zoo.catalogue import Zoo
from zoo.entry import Entry, open_entry
from zoo.errors import MismatchError, ZooError
from zoo.index import Reference, parse_reference
from zoo.locations import builtin_storage, cache_storage, configured_storages, open_zoo_storage
from zoo.manifest import NAME
from zoo.storage import Storage

REQUIRE_SIGNATURE = "MOECAST_REQUIRE_SIGNATURE"
"""A public key: entries that its owner did not sign are not used. Ours ship inside the package."""


def zoos() -> list[Zoo]:
    """Where names are looked up without a network, first match wins: what was pulled, then what
    ships with us.
    """
    return [Zoo(cache_storage()), Zoo(builtin_storage())]


def listed() -> set[str]:
    """Names of all entries that are here."""
    return {name for zoo in zoos() for name in zoo.index().entries}


def find(reference: str | Path) -> Entry:
    """The entry that is meant by a name (`NAME`, `NAME@latest`, `NAME@ALIAS`, `NAME@DIGEST`), the
    path of a folder, or an address: `ZOO#NAME`, or `ZOO` alone where it has one entry.

    A name that was pulled, or ships with us, is that, and no network is used. Another one is pulled
    from the zoos of MOECAST_ZOO, in their order, when there are any.

    Raises:
        ZooError: it is none of these, and the message has the choices; UnreachableError,
            DamagedError, StaleError, SignatureError: as pulling does.
    """
    entry = _find(reference)
    key = os.environ.get(REQUIRE_SIGNATURE)
    if key and entry.where != builtin_storage().address:
        from zoo.signing import check_signature

        check_signature(entry, key=Path(key))
    return entry


def _find(reference: str | Path) -> Entry:
    if isinstance(reference, str) and "://" in reference:
        return by_address(reference)
    named = None
    if isinstance(reference, str) and NAME.fullmatch(reference.partition("@")[0]):
        named = parse_reference(reference)
        holders = [zoo for zoo in zoos() if named.name in zoo.index().entries]
        for zoo in holders:
            if zoo.holds(named):
                return zoo.open(named)
        if holders and not configured_storages():
            return holders[0].open(named)  # which says what versions there are
    if Path(reference).is_dir():
        return open_entry(reference)
    if named is not None:
        for place in configured_storages():
            if Zoo(place).holds(named):
                return pulled(place, named)
    raise ZooError(_unknown(str(reference)))


def _unknown(reference: str) -> str:
    return (
        f"{unknown('zoo entry', reference, listed())}. Or name an entry's folder; python -m "
        "zoo list shows what is here, python -m zoo pull NAME zoo=ADDRESS gets others"
    )


def by_address(address: str) -> Entry:
    """The entry `ZOO#NAME[@VERSION]`, or the only one of `ZOO`.

    From the cache if it is there and names one digest, otherwise pulled.
    """
    where, _, name = address.partition("#")
    place = open_zoo_storage(where)
    if not name:
        names = list(Zoo(place).index(required=True).entries)
        if len(names) != 1:
            raise ZooError(
                f"{where} has {len(names)} entries; write {where}#NAME: {', '.join(names[:8])}"
            )
        name = names[0]
    reference = parse_reference(name)
    kept = Zoo(cache_storage())
    if len(reference.version) == 64 and kept.holds(reference):
        return kept.open(reference)
    return pulled(place, reference)


def pulled(place: Storage, reference: Reference) -> Entry:
    """The entry, from the cache, after what of it is not there was brought, as a line on stderr
    says.
    """
    from zoo.freshness import fresh_index
    from zoo.pulling import Cache, pull

    zoo = Zoo(place)
    index = fresh_index(zoo)
    digest = zoo.resolve(reference, index)
    version = index.entries[reference.name].versions[digest]
    target = Cache(cache_storage())
    if not target.has(digest, None):
        sys.stderr.write(f"pulling {reference.name}@{digest[:12]} from {place.address}\n")
    return pull(zoo, reference.name, digest, version, cache=target)


def load_predictor(
    reference: str | Path, *, spec: ModelSpec | None, options: Mapping[str, Any] | None = None
) -> Predictor:
    """A predictor from the zoo or a folder, every byte of it checked.

    `options` take the place of the entry's own of that name.

    `spec` is the model that it is to serve: MismatchError, naming both sides, when the entry was
    made for another; None takes the entry's own word for it. Otherwise raises as `find`.
    """
    from predictors.registry import from_files

    entry = find(reference)
    manifest = entry.manifest
    if spec is not None:
        manifest.spec.require(
            spec,
            this=f"the zoo entry {manifest.name}",
            that="the model",
            error=MismatchError,
            hint="Choose an entry made for this model (python -m zoo list), "
            "or train one: python -m train",
        )
    return from_files(
        manifest.kind,
        manifest.spec,
        files=entry.payload(),
        options={**manifest.options, **(options or {})},
    )
