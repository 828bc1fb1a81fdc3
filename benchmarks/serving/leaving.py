"""Clients that go away in the middle of whatever they do: plain sockets, because no client library
leaves as badly as networks do.
"""

import asyncio
import json
import random
import socket
import struct
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from urllib.parse import urlsplit

RESET = struct.pack("ii", 1, 0)
"""SO_LINGER of zero seconds: closing sends RST, and not FIN."""


class Leaves(StrEnum):
    """When the client goes."""

    CONNECTED = "connected"
    """Nothing was sent."""
    IN_HEADERS = "in headers"
    IN_BODY = "in the body"
    ASKED = "asked"
    """All was sent; nothing is read."""
    READING = "reading"
    """Some of the answer was read."""


@dataclass(frozen=True, kw_only=True)
class Departure:
    when: Leaves
    path: str
    body: bytes
    after_seconds: float
    """Between what it does last and its going."""
    resets: bool
    """RST in place of FIN."""


def departures(number: int, *, seed: int, tokens: int, prompts: Sequence[str]) -> list[Departure]:
    """Random ones, the same for the same seed."""
    draw = random.Random(seed)
    found = []
    for _ in range(number):
        prompt = draw.choice(prompts)
        is_chat = draw.random() < 0.3
        body: dict[str, object] = {
            "max_tokens": tokens,
            "ignore_eos": True,
            "stream": draw.random() < 0.6,
            "n": draw.choice((1, 1, 1, 2)),
        }
        body |= (
            {"messages": [{"role": "user", "content": prompt}]} if is_chat else {"prompt": prompt}
        )
        found.append(
            Departure(
                when=draw.choice(list(Leaves)),
                path="/v1/chat/completions" if is_chat else "/v1/completions",
                body=json.dumps(body).encode(),
                after_seconds=draw.choice((0.0, draw.uniform(0, 0.4))),
                resets=draw.random() < 0.5,
            )
        )
    return found


async def leave(url: str, departure: Departure) -> int | None:
    """Does it; returns the answer's status if one was read."""
    place = urlsplit(url)
    reader, writer = await asyncio.open_connection(place.hostname, place.port)
    request = (
        f"POST {departure.path} HTTP/1.1\r\nHost: {place.netloc}\r\n"
        "Content-Type: application/json\r\n"
        f"Content-Length: {len(departure.body)}\r\n\r\n"
    ).encode() + departure.body
    lengths = {
        Leaves.CONNECTED: 0,
        Leaves.IN_HEADERS: 40,
        Leaves.IN_BODY: len(request) - len(departure.body) // 2,
    }
    status = None
    with suppress(ConnectionError, TimeoutError):
        writer.write(request[: lengths.get(departure.when, len(request))])
        await writer.drain()
        if departure.when is Leaves.READING:
            line = await asyncio.wait_for(reader.readline(), 2.0)
            status = int(line.split()[1]) if line else None
        await asyncio.sleep(departure.after_seconds)
    if departure.resets:
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
    writer.close()
    with suppress(ConnectionError):
        await writer.wait_closed()
    return status


async def leave_all(url: str, found: Sequence[Departure], *, together: int) -> list[int | None]:
    """So many clients at a time; the statuses that were read."""
    room = asyncio.Semaphore(together)

    async def one(departure: Departure) -> int | None:
        async with room:
            return await leave(url, departure)

    return list(await asyncio.gather(*map(one, found)))
