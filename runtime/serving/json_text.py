"""Compact JSON in ASCII, which can always be encoded; large lists are written piece by piece."""

import json
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any

BATCH_ITEMS = 64
"""Items that are encoded by one call, during which no other thread runs Python."""


class LazyList:
    """A list of JSON whose items are made while it is written, so that few exist at a time.

    Args:
        items: begins the iteration anew with each call.
    """

    def __init__(self, items: Callable[[], Iterable[Any]]):
        self._items = items

    def __iter__(self) -> Iterator[Any]:
        return iter(self._items())


def _list_items(value: Any) -> list[Any]:
    if isinstance(value, LazyList):
        return list(value)
    raise TypeError(f"{type(value).__name__} has no form in JSON")


def to_json(value: Any) -> str:
    """Encode a small value at once."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False, default=_list_items)


def json_pieces(value: Any) -> Iterator[str]:
    """Yield the text of `to_json` in pieces, each of which takes milliseconds at most."""
    if isinstance(value, dict):
        separator = "{"
        for name, item in value.items():
            yield f"{separator}{to_json(name)}:"
            yield from json_pieces(item)
            separator = ","
        yield "}" if value else "{}"
    elif isinstance(value, LazyList):
        items, separator = iter(value), "["
        while batch := list(islice(items, BATCH_ITEMS)):
            yield separator + to_json(batch)[1:-1]
            separator = ","
        yield "]" if separator == "," else "[]"
    elif isinstance(value, list):
        separator = "["
        for item in value:
            yield separator
            yield from json_pieces(item)
            separator = ","
        yield "]" if value else "[]"
    else:
        yield to_json(value)


def write_json(value: Any) -> bytes:
    """Encode a large value; other threads run between its pieces."""
    return "".join(json_pieces(value)).encode()
