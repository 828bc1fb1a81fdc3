"""An index may not go back: who serves an old one hides what was withdrawn since."""

from filelock import FileLock
from pydantic import ValidationError

from predictors.files import write_atomic
from zoo.catalogue import Zoo
from zoo.digest import digest_of
from zoo.errors import StaleError
from zoo.index import Index
from zoo.locations import builtin_storage, cache_storage
from zoo.manifest import Sha256, Strict

SEEN = "seen.json"


class Seen(Strict):
    """The newest index that this user was shown by a place."""

    serial: int
    sha256: Sha256


class Memory(Strict):
    """All of them, by the place's address."""

    places: dict[str, Seen] = {}


def fresh_index(zoo: Zoo, *, accept_rollback: bool = False) -> Index:
    """The place's index, compared with what was seen of it before, which is then remembered.

    Raises:
        StaleError: the index is past its date, older than one seen before, or another one with the
            same serial. `accept_rollback` takes it all the same, as for a zoo made anew.
        ZooError, DamagedError, UnreachableError: as `Zoo.index`.
    """
    data = zoo.index_bytes()
    index = zoo.parse(data, required=True)
    assert data is not None
    where = zoo.storage.address
    if index.has_expired():
        raise StaleError(
            f"the index of {where} expired on {index.expires}; ask who runs it to renew it "
            "(python -m zoo index)"
        )
    if where == builtin_storage().address:
        return index  # an older release of ours has an older one
    now = Seen(serial=index.serial, sha256=digest_of(data))
    folder = cache_storage().folder
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / f".{SEEN}.lock"):
        memory = remembered()
        last = memory.places.get(where)
        if last is not None and not accept_rollback:
            refuse_rollback(now, last, where=where)
        if now != last:
            changed = Memory(places={**memory.places, where: now})
            write_atomic(folder / SEEN, changed.model_dump_json(indent=2).encode())
    return index


def refuse_rollback(now: Seen, last: Seen, *, where: str) -> None:
    """StaleError unless the index is the last one or a later one."""
    hint = "If the zoo was made anew, say accept_rollback=true."
    if now.serial < last.serial:
        raise StaleError(
            f"the index of {where} has the serial {now.serial}, and {last.serial} was seen before: "
            f"somebody serves an old one. {hint}"
        )
    if now.serial == last.serial and now.sha256 != last.sha256:
        raise StaleError(
            f"the index of {where} has changed without a new serial ({now.serial}): somebody "
            f"altered it. {hint}"
        )


def remembered() -> Memory:
    """What was seen so far; nothing where the file is damaged: it only ever grows."""
    path = cache_storage().folder / SEEN
    try:
        return Memory.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        return Memory()
    except ValidationError as error:
        raise StaleError(
            f"{path} is damaged, so a served index cannot be compared with earlier ones; remove it "
            "to begin anew"
        ) from error
