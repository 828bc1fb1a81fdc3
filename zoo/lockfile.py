"""`zoo.lock`: the digest of each entry, and a zoo that has it."""

from pathlib import Path
from typing import Literal

from pydantic import Field, ValidationError

from predictors.records import Sha256, StrictRecord, explain_validation_error
from zoo.digest import read_plain_file
from zoo.errors import ZooError
from zoo.index import MAX_INDEX_BYTES
from zoo.manifest import NAME


class LockedEntry(StrictRecord):
    digest: Sha256
    zoo: str
    """Address of the zoo; another zoo that has the digest serves as well."""


class Lockfile(StrictRecord):
    """The content of `zoo.lock`."""

    format_version: Literal[1] = 1
    entries: dict[str, LockedEntry] = Field(default_factory=dict)


def read_lockfile(path: Path) -> Lockfile:
    """Reads a lock file; ZooError if there is none, or its content is not allowed."""
    try:
        lockfile = Lockfile.model_validate_json(read_plain_file(path, limit=MAX_INDEX_BYTES))
    except FileNotFoundError as error:
        raise ZooError(f"{path} does not exist; moecast zoo lock writes it") from error
    except ValidationError as error:
        raise ZooError(f"{path} is not a lock file: {explain_validation_error(error)}") from error
    for name in lockfile.entries:
        if not NAME.fullmatch(name):
            raise ZooError(f"{path}: {name!r} is not the name of an entry")
    return lockfile
