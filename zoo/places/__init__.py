"""Where a zoo's static files lie: a folder, a web server, an object store, the Hub, a wheel."""

import os
from pathlib import Path

import platformdirs

from zoo.errors import ZooError
from zoo.places.base import Place, Stream, WritablePlace
from zoo.places.folder import FolderPlace
from zoo.places.package import SCHEME as PACKAGE
from zoo.places.package import PackagePlace

__all__ = [
    "BUILTIN",
    "FolderPlace",
    "Place",
    "Stream",
    "WritablePlace",
    "builtin",
    "cache",
    "configured",
    "place_of",
    "writable",
]

BUILTIN = Path(__file__).resolve().parents[1] / "builtin"
CACHE, ZOOS = "MOECAST_CACHE", "MOECAST_ZOO"


def builtin() -> FolderPlace:
    """The zoo that ships inside the package."""
    return FolderPlace(BUILTIN)


def cache() -> FolderPlace:
    """What was pulled: below MOECAST_CACHE, else the user's cache folder."""
    named = os.environ.get(CACHE)
    return FolderPlace((Path(named) if named else platformdirs.user_cache_path("moecast")) / "zoo")


def configured(zoos: str | None = None) -> list[Place]:
    """The places in a comma-separated list, in its order; those of MOECAST_ZOO unless given."""
    listed = os.environ.get(ZOOS, "") if zoos is None else zoos
    return [place_of(one.strip()) for one in listed.split(",") if one.strip()]


def place_of(where: str) -> Place:
    """The place that a user named: `builtin`, a folder, or an address.

    Raises:
        ZooError: an address that names no place.
    """
    if where == "builtin":
        return builtin()
    if where.startswith(("http://", "https://")):
        from zoo.places.http import HttpPlace

        return HttpPlace(where)
    if where.startswith("hf://"):
        from zoo.places.hub import hub_place

        return hub_place(where)
    if where.startswith(PACKAGE):
        return PackagePlace(where.removeprefix(PACKAGE).rstrip("/"))
    if "://" in where and not where.startswith("file://"):
        from zoo.places.objects import ObjectPlace

        return ObjectPlace(where)
    return FolderPlace(Path(where.removeprefix("file://")).expanduser())


def writable(where: str) -> WritablePlace:
    """The same for publishing.

    Raises:
        ZooError: a place that can only be read.
    """
    place = place_of(where)
    if not isinstance(place, WritablePlace):
        raise ZooError(
            f"{where} can only be read; publish to a folder, s3://BUCKET/PATH or hf://OWNER/REPO"
        )
    return place
