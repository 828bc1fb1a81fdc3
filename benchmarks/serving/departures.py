"""Clients that leave at random moments, and the resources of the server that they leave.

Each goes away connected, in the middle of headers or body, after its request, or while it reads;
with FIN or RST. Plain sockets do so: no client library leaves as badly as networks do.
"""

import asyncio
import json
import os
import random
import socket
import struct
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from urllib.parse import urlsplit

import httpx2

from benchmarks.serving.rows import Footprint
from benchmarks.serving.server import ServerProcess

PROMPTS = (
    "The heart pumps blood through the body, and the lungs",
    "It was late in the evening when the old man came to the door and",
    "Return a new list with the items of",
)
POOL_THREADS = min(32, (os.cpu_count() or 1) + 4)
"""Threads of asyncio's own pool (concurrent.futures.ThreadPoolExecutor)."""
GONE_SECONDS = 5.0
"""Time for connections to close; a leak stays longer."""
RESET = struct.pack("ii", 1, 0)
"""SO_LINGER of zero seconds: closing sends RST, and not FIN."""


class LeaveMoment(StrEnum):
    """The moment in which a client leaves."""

    CONNECTED = "connected"
    """Before its request."""
    IN_HEADERS = "in headers"
    IN_BODY = "in the body"
    SENT = "sent"
    """After its request; nothing of the answer is read."""
    READING = "reading"
    """After the beginning of the answer."""


@dataclass(frozen=True, kw_only=True)
class Departure:
    """A client that leaves."""

    when: LeaveMoment
    path: str
    body: bytes
    after_seconds: float
    """Time between the last thing that it does and its leaving."""
    resets: bool
    """Leaves with RST in place of FIN."""


def random_departures(
    number: int, *, seed: int, tokens: int, prompts: Sequence[str]
) -> list[Departure]:
    """Returns random clients, the same for the same seed."""
    draw = random.Random(seed)
    departures = []
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
        departures.append(
            Departure(
                when=draw.choice(list(LeaveMoment)),
                path="/v1/chat/completions" if is_chat else "/v1/completions",
                body=json.dumps(body).encode(),
                after_seconds=draw.choice((0.0, draw.uniform(0, 0.4))),
                resets=draw.random() < 0.5,
            )
        )
    return departures


async def leave(url: str, departure: Departure, *, key: str | None = None) -> int | None:
    """Connects and leaves; returns the answer's status if one was read."""
    address = urlsplit(url)
    authorization = f"Authorization: Bearer {key}\r\n" if key else ""
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    request = (
        f"POST {departure.path} HTTP/1.1\r\nHost: {address.netloc}\r\n"
        "Content-Type: application/json\r\n"
        f"{authorization}Content-Length: {len(departure.body)}\r\n\r\n"
    ).encode() + departure.body
    lengths = {
        LeaveMoment.CONNECTED: 0,
        LeaveMoment.IN_HEADERS: 40,
        LeaveMoment.IN_BODY: len(request) - len(departure.body) // 2,
    }
    status = None
    with suppress(ConnectionError, TimeoutError):
        writer.write(request[: lengths.get(departure.when, len(request))])
        await writer.drain()
        if departure.when is LeaveMoment.READING:
            line = await asyncio.wait_for(reader.readline(), 2.0)
            status = int(line.split()[1]) if line else None
        await asyncio.sleep(departure.after_seconds)
    if departure.resets:
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
    writer.close()
    with suppress(ConnectionError):
        await writer.wait_closed()
    return status


def fill_pool(target: ServerProcess) -> None:
    """Lets the server start all threads of its pool for tokenising texts.

    A pool starts a thread when more texts are tokenised at a time than ever before.
    """
    body = {"prompt": "The lungs carry air to the blood. " * 800}

    def tokenize(_: int) -> int:
        return httpx2.post(f"{target.url}/tokenize", json=body, timeout=60).status_code

    with ThreadPoolExecutor(2 * POOL_THREADS) as pool:
        assert set(pool.map(tokenize, range(2 * POOL_THREADS))) == {200}


def idle_footprint(target: ServerProcess, before: Footprint | None = None) -> Footprint:
    """Returns the idle server's resources; waits until connections have closed.

    Args:
        target: The server.
        before: Wait until there are no more threads and descriptors than these.
    """
    target.wait_idle()
    deadline = time.monotonic() + GONE_SECONDS
    while True:
        footprint = target.footprint()
        if before is None or time.monotonic() > deadline:
            return footprint
        if footprint.threads <= before.threads and footprint.descriptors <= before.descriptors:
            return footprint
        time.sleep(0.1)
