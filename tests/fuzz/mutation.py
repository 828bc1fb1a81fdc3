"""Mutations of an input: of its JSON values where it has some, else of its bytes."""

import json
import random
from collections.abc import Callable
from typing import Any

NASTY_VALUES: tuple[Any, ...] = (
    None, True, 0, -1, 1, 2**31 - 1, 2**31, 2**63, 2**64, -(2**63) - 1, 10**400, 0.5, -0.0, 1e308,
    float("nan"), float("inf"), "", "a", "\0", "\ud800", "\u202e", "\n", "../x", "a" * 5000,
    "9" * 5000, [], {}, [[]], [None], [1, "a"], {"": 0}, {"a": {"b": []}},
    "é", "1e999", "0x10", "${a}", [0] * 300,
)  # fmt: skip
NASTY_BYTES = (
    b"\0", b"\xff", b"\xff\xfe", b"\xed\xa0\x80", b"\r\n", b"\n", b",", b'"', b"[", b"{", b"}",
    b"]", b"null", b"NaN", b"-Infinity", b"1e999", b"9" * 5000, b"[" * 2000, b'{"a":' * 2000,
    b"\\ud800", b"\x1b[2J", b"=", b"${x}", b"---\n", b"\xef\xbb\xbf", b"\x7f" * 8, b"\xff" * 8,
)  # fmt: skip
MOST_BYTES = 1 << 16


def mutate(data: bytes, rng: random.Random, others: list[bytes]) -> bytes:
    """Returns a changed input of at most 64 KiB.

    Args:
        others: inputs to splice with.
    """
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        changed = mutate_json(data, rng) if rng.random() < 0.6 else None
        data = mutate_bytes(data, rng, others) if changed is None else changed
    return data[:MOST_BYTES]


def mutate_json(data: bytes, rng: random.Random) -> bytes | None:
    """Changes one value of a JSON text, which may follow a length of 8 bytes; None if it has none.

    Of several lines, changes one.
    """
    for start in (0, 8):
        head, lines = data[:start], data[start:].split(b"\n")
        if start == 0 and len(lines) > 1 and lines[0].startswith(b"{") and len(lines[0]) > 1:
            number = rng.randrange(len(lines))
            changed = mutate_json(lines[number], rng) if lines[number] else None
            if changed is None:
                return None
            return b"\n".join([*lines[:number], changed, *lines[number + 1 :]])
        try:
            value = json.loads(data[start:])
        except (ValueError, RecursionError):
            continue
        text = json.dumps(mutate_value(value, rng), indent=rng.choice((None, 2))).encode()
        return (len(text).to_bytes(8, "little") if head else b"") + text
    return None


def change_fields(data: bytes, change: Callable[[dict], dict]) -> bytes:
    """Returns the JSON object with other fields; other bytes as they are."""
    try:
        return json.dumps(change(json.loads(data))).encode()
    except (ValueError, RecursionError, TypeError, KeyError, AttributeError):
        return data


def mutate_value(value: Any, rng: random.Random) -> Any:
    """Replaces, removes or repeats a random part of a JSON value."""
    if not isinstance(value, dict | list) or not value or rng.random() < 0.1:
        return rng.choice(NASTY_VALUES)
    if isinstance(value, list):
        number = rng.randrange(len(value))
        action = rng.random()
        if action < 0.1:
            return value[:number] + value[number + 1 :]
        if action < 0.2:
            return value * rng.choice((2, 50))
        return [*value[:number], mutate_value(value[number], rng), *value[number + 1 :]]
    key = rng.choice(list(value))
    action = rng.random()
    if action < 0.1:
        return {name: part for name, part in value.items() if name != key}
    if action < 0.2:
        return {**value, str(rng.choice(NASTY_VALUES))[:300]: value[key]}
    if action < 0.25:
        return {**value, key: value[rng.choice(list(value))]}
    return {**value, key: mutate_value(value[key], rng)}


def mutate_bytes(data: bytes, rng: random.Random, others: list[bytes]) -> bytes:
    """Flips, inserts, removes, repeats or splices bytes."""
    start = rng.randrange(len(data) + 1)
    end = min(len(data), start + rng.choice((1, 2, 8, 64)))
    action = rng.randrange(5)
    if action == 0 and start < len(data):
        return data[:start] + bytes([data[start] ^ 1 << rng.randrange(8)]) + data[start + 1 :]
    if action == 1:
        return data[:start] + data[end:]
    if action == 2:
        return data[:end] + data[start:end] * rng.choice((1, 3, 100)) + data[end:]
    if action == 3:
        other = rng.choice(others)
        return data[:start] + other[rng.randrange(len(other) + 1) :]
    return data[:start] + rng.choice(NASTY_BYTES) + data[end:]
