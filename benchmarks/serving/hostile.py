"""Clients that mean harm: what each sends to the server, and how it leaves.

Each is a coroutine that gets a `Victim` and ends by itself. They speak HTTP over plain sockets,
because no client library sends what they send. What a server may answer is said in `ATTACKS`.
"""

import asyncio
import json
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any
from urllib.parse import urlsplit

from benchmarks.serving.departures import PROMPTS, leave, random_departures

ANSWER_SECONDS = 120.0
"""Most time for an answer: a complete request waits for its turn among honest ones."""
STALL_SECONDS = 12.0
"""Time for which connections are held that are never finished."""
DRIP_SECONDS = 1.0
NUM_IDLE, NUM_SLOW = 200, 60
"""Connections of one attack, which together exceed none of the limits of a small machine."""
LARGEST_BODY = 1 << 20
"""`max_body` of the server."""
UNFINISHED_BYTE_TOKEN = 226
"""Place of a byte, in most vocabularies of byte pairs, that begins a character of three bytes."""

Statuses = list[str]
"""Answers: statuses, `closed` and `no answer`."""


@dataclass(frozen=True)
class Victim:
    """The server that is attacked."""

    url: str
    key: str
    rng: random.Random

    def headers(self, *lines: str, key: str | None = None) -> bytes:
        """Returns the lines of the head after the first, with the key and the empty line."""
        own = [f"Host: {urlsplit(self.url).netloc}", "Content-Type: application/json"]
        own.append(f"Authorization: Bearer {self.key if key is None else key}")
        return "".join(f"{line}\r\n" for line in (*own, *lines, "")).encode()

    def post(self, path: str, body: Any, *lines: str, key: str | None = None) -> bytes:
        """Returns a whole request."""
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        head = self.headers(f"Content-Length: {len(content)}", *lines, key=key)
        return f"POST {path} HTTP/1.1\r\n".encode() + head + content


@asynccontextmanager
async def connected(
    victim: Victim,
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """Connects, and resets the connection at the end."""
    address = urlsplit(victim.url)
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    try:
        yield reader, writer
    finally:
        writer.transport.abort()


async def read_status(reader: asyncio.StreamReader) -> str:
    """Returns the status of the next answer, or how the connection ended without one."""
    try:
        async with asyncio.timeout(ANSWER_SECONDS):
            while (line := await reader.readline()).startswith(b"HTTP/1.1 1"):
                while (await reader.readline()).strip():
                    pass
    except TimeoutError:
        return "no answer"
    except ConnectionError:
        return "closed"
    return line.split()[1].decode() if line else "closed"


async def ask(victim: Victim, request: bytes) -> str:
    """Sends a request and returns its status."""
    async with connected(victim) as (reader, writer):
        with suppress(ConnectionError):
            writer.write(request)
            await writer.drain()
        return await read_status(reader)


def list_bombs() -> list[tuple[str, str]]:
    """Returns paths and bodies near the largest size, of items that are all invalid."""
    user = '{"role":"user"}'
    forms = {
        "/v1/completions": [
            ('{"prompt":[', "[]"),
            ('{"prompt":[', "{}"),
            ('{"prompt":[', '"a"'),
            ('{"prompt":[[', "-1"),
            ('{"prompt":"a","stop":[', "{}"),
            ('{"prompt":"a","stop_token_ids":[', '"x"'),
        ],
        "/v1/chat/completions": [
            ('{"messages":[', "[]"),
            ('{"messages":[', user),
            ('{"messages":[{"role":"user","content":[', '{"type":"image"}'),
        ],
        "/detokenize": [('{"tokens":[', '"x"')],
    }
    bombs = []
    for path, pairs in forms.items():
        for start, item in pairs:
            number = (LARGEST_BODY - len(start) - 8) // (len(item) + 1)
            closing = "".join("]" if letter == "[" else "}" for letter in reversed(start)
                              if letter in "[{")  # fmt: skip
            bombs.append((path, start + ",".join([item] * number) + closing))
    nested = LARGEST_BODY // 3
    bombs.append(("/v1/completions", '{"prompt":' + "[" * nested + "]" * nested + "}"))
    return bombs


BOMBS = [(path, body.encode()) for path, body in list_bombs()]


async def send_bomb(victim: Victim) -> Statuses:
    """A megabyte of items, each of which is an error."""
    path, body = victim.rng.choice(BOMBS)
    return [await ask(victim, victim.post(path, body))]


async def ask_for_everything(victim: Victim) -> Statuses:
    """Prompts, answers and log-probabilities, each as many as allowed or a few more."""
    number = victim.rng.choice((1, 4, 18, 4096))
    body = {
        "prompt": ["word " * 40] * number,
        "n": 4,
        "echo": True,
        "logprobs": 20,
        "max_tokens": 16,
    }
    return [await ask(victim, victim.post("/v1/completions", body))]


async def tokenize_much(victim: Victim) -> Statuses:
    """A text of the largest size, and prompts of one letter."""
    text = "lungs carry air " * (LARGEST_BODY // 17)
    return [
        await ask(victim, victim.post("/tokenize", {"prompt": text})),
        await ask(victim, victim.post("/v1/completions", {"prompt": ["a"] * 200_000})),
    ]


async def detokenize_bytes(victim: Victim) -> Statuses:
    """Bytes that never become a character; the client leaves before the answer."""
    body = {"tokens": [UNFINISHED_BYTE_TOKEN] * victim.rng.choice((2000, 16_000))}
    request = victim.post("/detokenize", body)
    async with connected(victim) as (_, writer):
        writer.write(request)
        await writer.drain()
        await asyncio.sleep(0.05)
    return ["left", await ask(victim, request)]


async def hold(victim: Victim, number: int, start: bytes, drip: bytes) -> Statuses:
    """Opens connections that send a start and then a drip each second."""
    ends: Statuses = []

    async def hold_one() -> None:
        try:
            async with asyncio.timeout(STALL_SECONDS), connected(victim) as (reader, writer):
                writer.write(start)
                while not reader.at_eof():
                    await asyncio.sleep(DRIP_SECONDS)
                    writer.write(drip)
                    await writer.drain()
        except TimeoutError:
            ends.append("held")
        except ConnectionError:
            ends.append("closed")
        else:
            ends.append("closed")

    await asyncio.gather(*(hold_one() for _ in range(number)))
    return ends


async def stay_idle(victim: Victim) -> Statuses:
    return await hold(victim, NUM_IDLE, b"", b"")


async def drip_headers(victim: Victim) -> Statuses:
    return await hold(victim, NUM_SLOW, b"GET / HTTP/1.1\r\nX: ", b"a")


async def drip_body(
    victim: Victim, *, line: bytes = b"POST /v1/completions", drop: bytes, key: str | None = None
) -> Statuses:
    start = line + b" HTTP/1.1\r\n" + victim.headers("Content-Length: 900000", key=key)
    return await hold(victim, NUM_SLOW, start, drop)


async def read_nothing(victim: Victim) -> Statuses:
    """Requests in a row whose answers are never read."""
    requests = (b"GET /metrics HTTP/1.1\r\n" + victim.headers()) * 200
    return await hold(victim, 8, requests, b"")


async def leave_in_the_middle(victim: Victim) -> Statuses:
    """Clients that ask for long answers and leave at random moments, some of them with RST."""
    departures = random_departures(
        12, seed=victim.rng.randrange(10**9), tokens=400, prompts=PROMPTS
    )
    statuses = await asyncio.gather(
        *(leave(victim.url, departure, key=victim.key) for departure in departures)
    )
    return ["left" if status is None else str(status) for status in statuses]


async def close_half(victim: Victim) -> Statuses:
    """A complete request, then the end of the sending half; and one that ends within its body."""
    whole = victim.post("/v1/completions", {"prompt": PROMPTS[0], "max_tokens": 4})
    statuses = []
    for request in (whole, whole[:-5]):
        async with connected(victim) as (reader, writer):
            writer.write(request)
            writer.write_eof()
            statuses.append(await read_status(reader))
    return statuses


async def send_large_headers(victim: Victim) -> Statuses:
    bombs = (
        [f"X-Long: {'a' * 200_000}"],
        [f"X-{number}: a" for number in range(20_000)],
        ["Content-Length: 1", "Content-Length: 2"],
        ["Content-Length: 5", "Transfer-Encoding: chunked"],
        ["Transfer-Encoding: chunked, identity"],
        ["Host: evil.example"],
    )
    lines = victim.rng.choice(bombs)
    return [await ask(victim, b"POST /v1/completions HTTP/1.1\r\n" + victim.headers(*lines))]


async def guess_keys(victim: Victim) -> Statuses:
    """Wrong keys on every path, paths that do not exist, and names that are markup."""
    paths = ("/v1/completions", "/metrics", "/status", "/", "/v1/models/%00", "/../etc/passwd")
    wrong = [victim.key[:-1], victim.key + "a", "", "a" * 10_000, "<script>", "\xff"]
    requests = [
        victim.post(victim.rng.choice(paths), {"prompt": "a"}, key=key, )
        for key in wrong
    ]  # fmt: skip
    named = {"prompt": "a", "model": '"}<script>alert(1)</script>\n{"'}
    requests.append(victim.post("/v1/completions", named, 'User-Agent: "}\x1b[31m<script>'))
    return [await ask(victim, request) for request in requests]


async def send_noise(victim: Victim) -> Statuses:
    """Bytes that are not HTTP, and requests with some bytes exchanged."""
    good = victim.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]})
    damaged = bytearray(good)
    for _ in range(victim.rng.randrange(1, 9)):
        damaged[victim.rng.randrange(len(damaged))] = victim.rng.randrange(256)
    # The end of the sending half tells the server that no more bytes will come.
    statuses = []
    for request in (victim.rng.randbytes(4096), bytes(damaged)):
        async with connected(victim) as (reader, writer):
            with suppress(ConnectionError):
                writer.write(request)
                writer.write_eof()
                await writer.drain()
            statuses.append(await read_status(reader))
    return statuses


async def fill_the_queue(victim: Victim) -> Statuses:
    """More answers than may wait, whose clients leave after a moment."""
    body = {"prompt": PROMPTS[1], "max_tokens": 300, "n": 4, "ignore_eos": True, "stream": True}
    request = victim.post("/v1/completions", body)

    async def ask_briefly() -> str:
        try:
            async with asyncio.timeout(2):
                return await ask(victim, request)
        except TimeoutError:
            return "left"

    return list(await asyncio.gather(*(ask_briefly() for _ in range(24))))


REFUSED = frozenset({"400", "413", "422", "429", "503"})
LEFT = frozenset({"left", "closed", "held"})


@dataclass(frozen=True)
class Attack:
    run: Callable[[Victim], Awaitable[Statuses]]
    allowed: frozenset[str]
    """Allowed answers of the server."""


ATTACKS: dict[str, Attack] = {
    "bombs": Attack(send_bomb, REFUSED),
    "everything": Attack(ask_for_everything, REFUSED | {"200"}),
    "long texts": Attack(tokenize_much, REFUSED | {"200"}),
    "unfinished characters": Attack(detokenize_bytes, REFUSED | LEFT | {"200"}),
    "idle": Attack(stay_idle, LEFT),
    "slow headers": Attack(drip_headers, LEFT),
    "slow bodies without a key": Attack(partial(drip_body, drop=b"a", key="wrong"), LEFT),
    "slow bodies": Attack(partial(drip_body, drop=b" "), LEFT),
    # A GET is answered before its body arrives.
    "leftover bodies": Attack(partial(drip_body, line=b"GET /health", drop=b"a"), LEFT),
    "unread answers": Attack(read_nothing, LEFT),
    "disconnects": Attack(leave_in_the_middle, REFUSED | LEFT | {"200"}),
    "half-closed": Attack(close_half, REFUSED | {"closed", "200"}),
    "headers": Attack(send_large_headers, REFUSED | {"closed", "401", "403", "408", "431", "501"}),
    "keys": Attack(guess_keys, REFUSED | {"closed", "401", "404", "405"}),
    "noise": Attack(
        send_noise,
        REFUSED | {"closed", "200", "401", "403", "404", "405", "408", "415", "431", "505"},
    ),
    "cancelled": Attack(fill_the_queue, REFUSED | LEFT | {"200"}),
}
"""In the order in which each client of `run_hostile` goes through them."""
BUSY = frozenset({"429", "503"})
"""Allowed at any time, with every attack."""


async def run_hostile(
    victim: Victim, goes_on: Callable[[], bool], note: Callable[[str, Statuses], None]
) -> None:
    """Attacks in turns, each client beginning elsewhere.

    Args:
        note: is called with the name of an attack and the statuses of its answers.
    """
    names: Sequence[str] = list(ATTACKS)
    place = victim.rng.randrange(len(names))
    while goes_on():
        name = names[place % len(names)]
        place += 1
        try:
            note(name, await ATTACKS[name].run(victim))
        except ConnectionError:
            note(name, ["closed"])
