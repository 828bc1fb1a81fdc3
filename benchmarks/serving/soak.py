"""A long mixed load: growth of the server's memory, threads and descriptors.

Clients send requests without pause, each time another one: completions and chats, streamed or
whole, several answers, log-probabilities of prompts, texts to tokenise, requests that are refused,
and clients that leave. After each round all clients pause until nothing is generated, so that what
requests need for themselves is gone, and the idle process is sampled; the slope is that of a
straight line through the second half of these samples.
"""

import asyncio
import random
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import httpx2
import numpy as np

from benchmarks.reports import default_threads, describe_machine
from benchmarks.serving.config import SoakConfig
from benchmarks.serving.disconnects import (
    PROMPTS,
    fill_pool,
    greedy_text,
    leave,
    random_departures,
)
from benchmarks.serving.rows import (
    FootprintSample,
    MemorySlope,
    SoakReport,
    write_part,
)
from benchmarks.serving.server import ServerProcess, run_server

SETTLE_SECONDS = 2.0
MAX_TOKENS = 48
LEAVING_SHARE = 0.2
"""Share of the clients that leave."""
REFUSED: tuple[dict[str, Any], ...] = (
    {"prompt": "a", "max_tokens": 10**6},
    {"prompt": "a", "n": 99},
    {"prompt": []},
    {"prompt": "a", "model": "another"},
    {"prompt": "word " * 4000},
)


def random_request(rng: random.Random) -> tuple[str, dict[str, Any], frozenset[int]]:
    """Returns path, body, and the statuses that the answer may have."""
    text = " ".join(rng.choices(PROMPTS, k=rng.randrange(1, 12)))
    common: dict[str, Any] = {
        "max_tokens": rng.randrange(1, MAX_TOKENS),
        "temperature": rng.choice((0, 0.8)),
        "stream": rng.random() < 0.5,
        "n": rng.choice((1, 1, 1, 4)),
    }
    kind = rng.random()
    good = frozenset({200, 429})
    if kind < 0.1:
        return "/tokenize", {"prompt": text}, frozenset({200})
    if kind < 0.2:
        return "/v1/completions", rng.choice(REFUSED), frozenset({400, 404, 429})
    if kind < 0.3:
        return (
            "/v1/completions",
            {"prompt": text, "max_tokens": 0, "echo": True, "logprobs": 2},
            good,
        )
    if kind < 0.6:
        messages = [{"role": "user", "content": text}]
        return "/v1/chat/completions", common | {"messages": messages}, good
    return "/v1/completions", common | {"prompt": text, "logprobs": rng.choice((None, 3))}, good


async def run_client(url: str, seed: int, until: float, counts: Counter[str]) -> None:
    """Sends requests until the time is over; counts statuses and unexpected ones."""
    rng = random.Random(seed)
    async with httpx2.AsyncClient(timeout=300) as http:
        while time.monotonic() < until:
            if rng.random() < LEAVING_SHARE:
                (departure,) = random_departures(
                    1, seed=rng.randrange(10**9), tokens=MAX_TOKENS, prompts=PROMPTS
                )
                await leave(url, departure)
                counts["left"] += 1
                continue
            path, body, allowed = random_request(rng)
            answer = await http.post(url + path, json=body)
            counts[str(answer.status_code)] += 1
            counts["unexpected"] += answer.status_code not in allowed
            if answer.status_code == 429:
                await asyncio.sleep(1)


def take_sample(target: ServerProcess, start: float) -> FootprintSample:
    return FootprintSample(**vars(target.footprint()), seconds=time.monotonic() - start)


@dataclass
class SoakLog:
    """Everything that was counted and sampled."""

    counts: Counter[str] = field(default_factory=Counter)
    idle: list[FootprintSample] = field(default_factory=list)
    """Between the rounds."""


async def run_round(target: ServerProcess, log: SoakLog, until: float, seeds: range) -> None:
    """Runs a client for each seed."""
    await asyncio.gather(*(run_client(target.url, seed, until, log.counts) for seed in seeds))


def run_load(
    target: ServerProcess, *, seconds: float, round_seconds: float, clients: int, seed: int
) -> SoakLog:
    log, start = SoakLog(), time.monotonic()
    while (left := start + seconds - time.monotonic()) > 0:
        until = time.monotonic() + min(left, round_seconds)
        asyncio.run(run_round(target, log, until, range(seed, seed + clients)))
        seed += clients
        target.wait_idle(120)
        time.sleep(SETTLE_SECONDS)
        log.idle.append(take_sample(target, start))
    return log


def fit_slope(samples: list[FootprintSample]) -> MemorySlope:
    """Fits a line through the anonymous memory of the second half of the samples."""
    half = samples[len(samples) // 2 :]
    if len(half) < 3:
        return MemorySlope(bytes_per_hour=None, percent_per_hour=None)
    hours = np.array([sample.seconds for sample in half]) / 3600
    memory = np.array([sample.anonymous_bytes for sample in half])
    per_hour = float(np.polyfit(hours, memory, 1)[0])
    return MemorySlope(
        bytes_per_hour=per_hour, percent_per_hour=100 * per_hour / float(memory.mean())
    )


def run_soak(config: SoakConfig) -> None:
    machine = describe_machine(default_threads())
    options: dict[str, Any] = {"budget": config.budget}
    if config.model is not None:
        options["model.id"] = config.model
    with run_server(options) as target:
        # Before the first sample: threads, and files that are read directly.
        fill_pool(target)
        greedy_text(target)
        target.wait_idle()
        before = target.footprint()
        log = run_load(
            target,
            seconds=60 * config.minutes,
            round_seconds=config.round_seconds,
            clients=config.clients,
            seed=config.seed,
        )
        after, metrics, left = target.footprint(), target.metrics(), target.idle_gauges()
        ended = target.stop()
    report = SoakReport(
        minutes=config.minutes,
        counts=dict(sorted(log.counts.items())),
        tokens_generated=metrics["vllm:generation_tokens_total"],
        before=before,
        after=after,
        left=left,
        anonymous_slope=fit_slope(log.idle),
        threads_leaked=after.threads - before.threads,
        descriptors_leaked=after.descriptors - before.descriptors,
        ended=ended,
        idle=log.idle,
    )
    write_part("soak", config, machine, report)
