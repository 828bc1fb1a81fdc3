"""Requests sent when they are due, whether earlier ones have ended or not; each one's times."""

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import httpx2

from benchmarks.serving.trace import Arrival


@dataclass(frozen=True, kw_only=True)
class Answer:
    """Of one request, in seconds since it was due: a client that could not send in time waits
    too.
    """

    ttft_seconds: float
    e2e_seconds: float
    tpot_seconds: float | None
    """None for a single token."""
    new_tokens: int
    text: str


async def ask(
    client: httpx2.AsyncClient, url: str, prompt: Sequence[int], new_tokens: int, due: float
) -> Answer:
    """One streamed completion of exactly so many greedy tokens."""
    body: dict[str, Any] = {
        "prompt": list(prompt),
        "max_tokens": new_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    first = last = None
    text, counted = "", 0
    async with client.stream("POST", f"{url}/v1/completions", json=body) as answer:
        answer.raise_for_status()
        async for line in answer.aiter_lines():
            if not line.startswith("data: {"):
                continue
            told = json.loads(line.removeprefix("data: "))
            assert "error" not in told, told
            if told["choices"]:
                last = time.monotonic()
                first = first or last
                text += told["choices"][0]["text"]
            if told.get("usage"):
                counted = told["usage"]["completion_tokens"]
    assert first is not None
    assert last is not None
    assert counted == new_tokens, f"{counted} tokens, {new_tokens} were asked for"
    return Answer(
        ttft_seconds=first - due,
        e2e_seconds=last - due,
        tpot_seconds=(last - first) / (counted - 1) if counted > 1 else None,
        new_tokens=counted,
        text=text,
    )


async def replay(
    url: str, arrivals: Sequence[Arrival], prompts: Sequence[Sequence[int]]
) -> list[Answer]:
    """All of them at their times; `prompts` are as long as the arrivals say."""
    start = time.monotonic()

    async def one(client: httpx2.AsyncClient, arrival: Arrival, prompt: Sequence[int]) -> Answer:
        due = start + arrival.seconds
        await asyncio.sleep(due - time.monotonic())
        return await ask(client, url, prompt, arrival.new_tokens, due)

    limits = httpx2.Limits(max_connections=None)
    async with httpx2.AsyncClient(timeout=3600, limits=limits) as client:
        waiting = (one(client, *pair) for pair in zip(arrivals, prompts, strict=True))
        return list(await asyncio.gather(*waiting))


async def one_by_one(
    url: str, arrivals: Sequence[Arrival], prompts: Sequence[Sequence[int]]
) -> list[Answer]:
    """Each when the one before has ended."""
    async with httpx2.AsyncClient(timeout=3600) as client:
        return [
            await ask(client, url, prompt, arrival.new_tokens, time.monotonic())
            for arrival, prompt in zip(arrivals, prompts, strict=True)
        ]
