"""A long mixed load: does the server grow?

    python -m benchmarks.serving.soak minutes=20

`clients=6` clients ask without pause, each time something else: completions and chats, streamed or
whole, several answers, log-probabilities of prompts, texts to tokenise, requests that are refused,
and clients that leave. Every five seconds the process's memory, descriptors and threads are looked
at; of memory what is resident, and what of that is no file's page (code of libraries comes as it is
first used). What requests need for themselves comes and goes. So every `round=60` seconds all
clients pause until nothing is generated, and memory is looked at then; slopes are those of straight
lines through the second half of these looks. `model=FOLDER` serves another model than the reference
model, `budget=50%`.
"""

import asyncio
import random
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import httpx2
import numpy as np

from benchmarks.serving.disconnects import PROMPTS, answer, fill_pool
from benchmarks.serving.leaving import departures, leave
from benchmarks.serving.results import here, keep
from benchmarks.serving.server import Server, server

SAMPLE_SECONDS = 5.0
SETTLE_SECONDS = 2.0
MAX_TOKENS = 48
LEAVES = 0.2
"""Of the requests, those whose client goes away."""
REFUSED: tuple[dict[str, Any], ...] = (
    {"prompt": "a", "max_tokens": 10**6},
    {"prompt": "a", "n": 99},
    {"prompt": []},
    {"prompt": "a", "model": "another"},
    {"prompt": "word " * 4000},
)


def request(draw: random.Random) -> tuple[str, dict[str, Any], frozenset[int]]:
    """Path, body, and the statuses that it may get."""
    said = " ".join(draw.choices(PROMPTS, k=draw.randrange(1, 12)))
    common: dict[str, Any] = {
        "max_tokens": draw.randrange(1, MAX_TOKENS),
        "temperature": draw.choice((0, 0.8)),
        "stream": draw.random() < 0.5,
        "n": draw.choice((1, 1, 1, 4)),
    }
    kind = draw.random()
    good = frozenset({200, 429})
    if kind < 0.1:
        return "/tokenize", {"prompt": said}, frozenset({200})
    if kind < 0.2:
        return "/v1/completions", draw.choice(REFUSED), frozenset({400, 404, 429})
    if kind < 0.3:
        return (
            "/v1/completions",
            {"prompt": said, "max_tokens": 0, "echo": True, "logprobs": 2},
            good,
        )
    if kind < 0.6:
        messages = [{"role": "user", "content": said}]
        return "/v1/chat/completions", common | {"messages": messages}, good
    return "/v1/completions", common | {"prompt": said, "logprobs": draw.choice((None, 3))}, good


async def client(url: str, seed: int, until: float, counts: Counter[str]) -> None:
    """Asks until the time is over; counts statuses and what was not as it should be."""
    draw = random.Random(seed)
    async with httpx2.AsyncClient(timeout=300) as http:
        while time.monotonic() < until:
            if draw.random() < LEAVES:
                (one,) = departures(
                    1, seed=draw.randrange(10**9), tokens=MAX_TOKENS, prompts=PROMPTS
                )
                await leave(url, one)
                counts["left"] += 1
                continue
            path, body, allowed = request(draw)
            answer = await http.post(url + path, json=body)
            counts[str(answer.status_code)] += 1
            counts["unexpected"] += answer.status_code not in allowed
            if answer.status_code == 429:
                await asyncio.sleep(1)


async def look(target: Server, start: float, until: float, samples: list[dict[str, float]]) -> None:
    while time.monotonic() < until:
        samples.append(await asyncio.to_thread(sample, target, start))
        await asyncio.sleep(SAMPLE_SECONDS)


def sample(target: Server, start: float) -> dict[str, float]:
    return {"seconds": time.monotonic() - start, **target.footprint()}


@dataclass
class Seen:
    counts: Counter[str] = field(default_factory=Counter)
    samples: list[dict[str, float]] = field(default_factory=list)
    """While clients ask."""
    idle: list[dict[str, float]] = field(default_factory=list)
    """Between rounds."""


async def ask(
    target: Server, seen: Seen, *, start: float, seconds: float, clients: int, seed: int
) -> None:
    """One round."""
    until = time.monotonic() + seconds
    asking = (client(target.url, seed + number, until, seen.counts) for number in range(clients))
    await asyncio.gather(look(target, start, until, seen.samples), *asking)


def run(target: Server, *, seconds: float, round_seconds: float, clients: int, seed: int) -> Seen:
    """Load and look; what was seen."""
    seen, start, number = Seen(), time.monotonic(), 0
    while (left := start + seconds - time.monotonic()) > 0:
        load = ask(
            target,
            seen,
            start=start,
            seconds=min(left, round_seconds),
            clients=clients,
            seed=seed + number * clients,
        )
        asyncio.run(load)
        number += 1
        target.wait_idle(120)
        time.sleep(SETTLE_SECONDS)
        seen.idle.append(sample(target, start))
    return seen


def minutes_of(samples: list[dict[str, float]]) -> list[dict[str, float]]:
    """Medians by minute."""
    every: dict[int, list[dict[str, float]]] = {}
    for one in samples:
        every.setdefault(int(one["seconds"] // 60), []).append(one)
    return [
        {"minute": minute}
        | {
            name: float(np.median([one[name] for one in found]))
            for name in ("rss_bytes", "anonymous_bytes", "descriptors", "threads")
        }
        for minute, found in every.items()
    ]


def slope(samples: list[dict[str, float]], name: str) -> dict[str, float | None]:
    """Of a kind of memory over the second half, a line through all looks (least squares)."""
    half = samples[len(samples) // 2 :]
    if len(half) < 3:
        return {"bytes_per_hour": None, "percent_per_hour": None}
    hours = np.array([one["seconds"] for one in half]) / 3600
    memory = np.array([one[name] for one in half])
    per_hour = float(np.polyfit(hours, memory, 1)[0])
    return {"bytes_per_hour": per_hour, "percent_per_hour": 100 * per_hour / float(memory.mean())}


def main(arguments: dict[str, str]) -> None:
    described = here()
    minutes = float(arguments.get("minutes", 20))
    options: dict[str, Any] = {"budget": arguments.get("budget", "50%")}
    if "model" in arguments:
        options["model.id"] = arguments["model"]
    with server(options) as target:
        # What is made once is there before the first look: threads, files that are read directly.
        fill_pool(target)
        answer(target)
        target.wait_idle()
        before = target.footprint()
        seen = run(
            target,
            seconds=60 * minutes,
            round_seconds=float(arguments.get("round", 60)),
            clients=int(arguments.get("clients", 6)),
            seed=int(arguments.get("seed", 0)),
        )
        after, metrics, left = target.footprint(), target.metrics(), target.taken()
        ended = target.end()
    found = {
        "minutes": minutes,
        "counts": dict(sorted(seen.counts.items())),
        "tokens_generated": metrics["vllm:generation_tokens_total"],
        "before": before,
        "after": after,
        "left": left,
        "rss_slope": slope(seen.idle, "rss_bytes"),
        "anonymous_slope": slope(seen.idle, "anonymous_bytes"),
        "threads_leaked": after["threads"] - before["threads"],
        "descriptors_leaked": after["descriptors"] - before["descriptors"],
        "ended": ended,
        "by_minute": minutes_of(seen.samples),
        "idle": seen.idle,
    }
    keep("soak", found, arguments, described)


if __name__ == "__main__":
    main(dict(argument.split("=", 1) for argument in sys.argv[1:]))
