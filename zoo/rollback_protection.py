"""Refuses an index older than one seen before, which would hide withdrawn entries."""

from pathlib import Path

from filelock import FileLock
from pydantic import ValidationError

from predictors.files import write_atomic
from predictors.records import Sha256, StrictRecord
from zoo.catalog import Zoo
from zoo.digest import hash_bytes
from zoo.errors import StaleError
from zoo.index import ZooIndex
from zoo.locations import builtin_storage, cache_storage
from zoo.signing import check_index_signature

SEEN = "seen.json"


class SeenIndex(StrictRecord):
    """The newest index that this user has seen of a zoo."""

    serial: int
    sha256: Sha256


class SeenIndexes(StrictRecord):
    """The content of `seen.json`: the newest index of each zoo, by canonical address."""

    places: dict[str, SeenIndex] = {}


MAX_CHANGES = 1_000_000
"""Largest step from one serial to the next one seen: a forged serial near the bound would make
every later index look old."""


def read_fresh_index(
    zoo: Zoo, *, accept_rollback: bool = False, key: Path | None = None
) -> ZooIndex:
    """Reads a zoo's index and checks it; raises as `Zoo.read_index` and `check_fresh`."""
    data = zoo.read_index_bytes()
    index = zoo.parse_index(data, required=True)
    assert data is not None
    check_fresh(zoo, index, data, accept_rollback=accept_rollback, key=key)
    return index


def check_fresh(
    zoo: Zoo,
    index: ZooIndex,
    data: bytes,
    *,
    accept_rollback: bool = False,
    key: Path | None = None,
) -> None:
    """Compares an index, `data` as it was read, with the newest one seen, and remembers it.

    With the public `key` of the zoo's owner, the index must be signed.

    Raises:
        SignatureError: the index is not signed with that key.
        StaleError: the index has expired; or, unless a rollback is accepted, it is older than one
            seen before, differs from one with the same serial, or skips a million serials.
    """
    address, place = zoo.storage.address, zoo.storage.canonical_address
    is_builtin = place == builtin_storage().canonical_address
    if key is not None and not is_builtin:
        check_index_signature(zoo.storage, data, key=key)
    if index.has_expired():
        raise StaleError(
            f"the index of {address} expired on {index.expires}; ask its owner to renew it "
            "(moecast zoo index)"
        )
    if is_builtin:
        return  # an older release of moecast has an older one
    current = SeenIndex(serial=index.serial, sha256=hash_bytes(data))
    folder = cache_storage().folder
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / f".{SEEN}.lock"):
        seen = read_seen_indexes()
        last = seen.places.get(place)
        if last is not None and not accept_rollback:
            hint = (
                "If its owner says that the zoo was made anew: moecast zoo pull NAME "
                f"zoo={address} accept_rollback=true"
            )
            if current.serial < last.serial:
                raise StaleError(
                    f"the index of {address} has serial {current.serial}, but {last.serial} was "
                    f"seen before: an old index is being served. {hint}"
                )
            if current.serial > last.serial + MAX_CHANGES:
                raise StaleError(
                    f"the index of {address} has serial {current.serial}, and {last.serial} was "
                    f"seen before: a zoo does not change so often, it may be forged. {hint}"
                )
            if current.serial == last.serial and current.sha256 != last.sha256:
                raise StaleError(
                    f"the index of {address} has changed without a new serial ({current.serial}): "
                    f"it was altered. {hint}"
                )
        if current != last:
            changed = SeenIndexes(places={**seen.places, place: current})
            write_atomic(folder / SEEN, changed.model_dump_json(indent=2).encode())


def read_seen_indexes() -> SeenIndexes:
    """Reads `seen.json`; empty if there is none."""
    path = cache_storage().folder / SEEN
    try:
        return SeenIndexes.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        return SeenIndexes()
    except ValidationError as error:
        raise StaleError(
            f"{path} is damaged, so a served index cannot be compared with earlier ones; remove it "
            "to start again"
        ) from error
