"""Zoo entries: predictors in folders and zoos, every byte checked before it is parsed."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zoo.entry import ZooEntry, open_entry, write_entry
    from zoo.errors import ZooError
    from zoo.load import find_entry, load_predictor

__all__ = ["ZooEntry", "ZooError", "find_entry", "load_predictor", "open_entry", "write_entry"]

HOMES = {
    "ZooEntry": "zoo.entry",
    "ZooError": "zoo.errors",
    "find_entry": "zoo.load",
    "load_predictor": "zoo.load",
    "open_entry": "zoo.entry",
    "write_entry": "zoo.entry",
}
"""Imported on first use: `--help` needs none of it."""


def __getattr__(name: str) -> Any:
    if name not in HOMES:
        raise AttributeError(f"module 'zoo' has no attribute {name!r}")
    return getattr(import_module(HOMES[name]), name)
