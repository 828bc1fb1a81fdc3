"""The zoos that pulled entries came from: `zoo lock` names them, since the cache is on one machine.

`origins.json` in the cache has the address of each digest. Passwords are no part of an address.
"""

import ipaddress
from urllib.parse import urlsplit

from filelock import FileLock
from pydantic import ValidationError

from predictors.files import write_atomic
from predictors.records import Sha256, StrictRecord
from zoo.errors import DamagedError
from zoo.storage import FolderStorage, PackageStorage, Storage

ORIGINS = "origins.json"


class EntryOrigins(StrictRecord):
    """The content of `origins.json`: the address of the zoo that each digest was pulled from."""

    addresses: dict[Sha256, str] = {}


def is_portable(storage: Storage) -> bool:
    """Returns whether the storage's address means the same zoo on other machines."""
    if isinstance(storage, PackageStorage):
        return True
    return storage.is_remote and not is_loopback(storage.address)


def is_loopback(address: str) -> bool:
    host = urlsplit(address).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


def record_origin(cache: FolderStorage, digest: str, source: Storage) -> None:
    """Remembers where an entry came from; a mirror on this machine replaces no other address."""
    path = cache.folder / ORIGINS
    # A relative folder would mean another one from another working directory.
    address = source.address if source.is_remote else source.canonical_address
    with FileLock(cache.folder / f".{ORIGINS}.lock"):
        known = read_origins(cache)
        if known.get(digest) == address or (digest in known and not is_portable(source)):
            return
        changed = EntryOrigins(addresses={**known, digest: address})
        write_atomic(path, (changed.model_dump_json(indent=2) + "\n").encode())


def read_origins(cache: FolderStorage) -> dict[str, str]:
    """Returns digest to address; empty if nothing was pulled. Raises DamagedError."""
    path = cache.folder / ORIGINS
    try:
        return EntryOrigins.model_validate_json(path.read_bytes()).addresses
    except FileNotFoundError:
        return {}
    except ValidationError as error:
        raise DamagedError(
            f"{path} is damaged; remove it: entries that are pulled again are listed in a new one"
        ) from error
