"""Requests sent when they are due, whether earlier ones have ended or not; the times of each."""

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import httpx2

from benchmarks.serving.rows import Arrival


@dataclass(frozen=True, kw_only=True)
class TimedCompletion:
    """One answer; seconds count from the time when the request was due."""

    ttft_seconds: float
    e2e_seconds: float
    tpot_seconds: float | None
    """None for a single token."""
    text: str


async def stream_completion(
    client: httpx2.AsyncClient, url: str, prompt: Sequence[int], new_tokens: int, due: float
) -> TimedCompletion:
    """Streams one completion of exactly `new_tokens` greedy tokens."""
    body: dict[str, Any] = {
        "prompt": list(prompt),
        "max_tokens": new_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    first = last = None
    text, completion_tokens = "", 0
    async with client.stream("POST", f"{url}/v1/completions", json=body) as answer:
        answer.raise_for_status()
        async for line in answer.aiter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line.removeprefix("data: "))
            assert "error" not in chunk, chunk
            if chunk["choices"]:
                last = time.monotonic()
                first = first or last
                text += chunk["choices"][0]["text"]
            if chunk.get("usage"):
                completion_tokens = chunk["usage"]["completion_tokens"]
    assert first is not None
    assert last is not None
    assert completion_tokens == new_tokens, f"got {completion_tokens} tokens, expected {new_tokens}"
    return TimedCompletion(
        ttft_seconds=first - due,
        e2e_seconds=last - due,
        tpot_seconds=(last - first) / (new_tokens - 1) if new_tokens > 1 else None,
        text=text,
    )


async def replay_arrivals(
    url: str, arrivals: Sequence[Arrival], prompts: Sequence[Sequence[int]]
) -> list[TimedCompletion]:
    """Sends all requests at their times; each prompt is as long as its arrival says."""
    start = time.monotonic()

    async def send(
        client: httpx2.AsyncClient, arrival: Arrival, prompt: Sequence[int]
    ) -> TimedCompletion:
        due = start + arrival.seconds
        await asyncio.sleep(due - time.monotonic())
        return await stream_completion(client, url, prompt, arrival.new_tokens, due)

    limits = httpx2.Limits(max_connections=None)
    async with httpx2.AsyncClient(timeout=3600, limits=limits) as client:
        pairs = zip(arrivals, prompts, strict=True)
        return list(await asyncio.gather(*(send(client, *pair) for pair in pairs)))


async def send_one_by_one(
    url: str, arrivals: Sequence[Arrival], prompts: Sequence[Sequence[int]]
) -> list[TimedCompletion]:
    """Sends each request when the one before it has ended."""
    async with httpx2.AsyncClient(timeout=3600) as client:
        return [
            await stream_completion(client, url, prompt, arrival.new_tokens, time.monotonic())
            for arrival, prompt in zip(arrivals, prompts, strict=True)
        ]
