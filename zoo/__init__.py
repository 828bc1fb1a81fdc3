"""Entries: predictors in folders and zoos, every byte checked before it is parsed."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zoo.entry import Entry, open_entry, write_entry
    from zoo.errors import ZooError
    from zoo.load import find, load_predictor

__all__ = ["Entry", "ZooError", "find", "load_predictor", "open_entry", "write_entry"]

HOMES = {
    "Entry": "zoo.entry",
    "ZooError": "zoo.errors",
    "find": "zoo.load",
    "load_predictor": "zoo.load",
    "open_entry": "zoo.entry",
    "write_entry": "zoo.entry",
}
"""Imported when first asked for: `--help` needs none of it."""


def __getattr__(name: str) -> Any:
    if name not in HOMES:
        raise AttributeError(f"module 'zoo' has no attribute {name!r}")
    return getattr(import_module(HOMES[name]), name)
