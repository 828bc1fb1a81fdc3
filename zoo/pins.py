"""`zoo.lock`: names and the digests that they had, so that a year later the same bytes come."""

from pathlib import Path
from typing import Literal

from pydantic import Field, ValidationError

from predictors.files import write_atomic
from zoo.errors import ZooError
from zoo.manifest import NAME, Sha256, Strict, explain

DEFAULT = Path("zoo.lock")


class Pin(Strict):
    """One entry."""

    digest: Sha256
    zoo: str
    """Where it was found; another zoo that has the digest serves as well."""


class Pins(Strict):
    """The whole of the file."""

    format_version: Literal[1] = 1
    entries: dict[str, Pin] = Field(default_factory=dict)


def write_pins(path: Path, pins: Pins) -> None:
    """Sorted by name, so that it can be kept under version control."""
    ordered = Pins(entries=dict(sorted(pins.entries.items())))
    write_atomic(path, (ordered.model_dump_json(indent=2) + "\n").encode())


def read_pins(path: Path) -> Pins:
    """ZooError when there is no such file, or something else in it."""
    try:
        pins = Pins.model_validate_json(path.read_bytes())
    except FileNotFoundError as error:
        raise ZooError(f"{path} is not there; python -m zoo lock writes it") from error
    except ValidationError as error:
        raise ZooError(f"{path} is not a lock file: {explain(error)}") from error
    for name in pins.entries:
        if not NAME.fullmatch(name):
            raise ZooError(f"{path}: {name!r} is not the name of an entry")
    return pins
