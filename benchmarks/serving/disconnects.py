"""A thousand clients that leave in the middle of everything: what do they leave behind?

    python -m benchmarks.serving.disconnects

`requests=1000` of `tokens=1500`, sixteen at a time, each going away at a random moment: connected,
in the middle of headers or body, asked, reading; with FIN or RST. Before and after, the process's
threads, descriptors and memory, what runs, waits and is pinned, and one answer. `seed=0`.
"""

import asyncio
import os
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2

from benchmarks.serving.leaving import departures, leave_all
from benchmarks.serving.results import here, keep
from benchmarks.serving.server import Server, server

PROMPTS = (
    "The heart pumps blood through the body, and the lungs",
    "It was late in the evening when the old man came to the door and",
    "Return a new list with the items of",
)
WARM_UP = 48
POOL_THREADS = min(32, (os.cpu_count() or 1) + 4)
"""Of asyncio's own pool (concurrent.futures.ThreadPoolExecutor)."""


def answer(target: Server) -> str:
    body = {"prompt": PROMPTS[0], "max_tokens": 24, "temperature": 0}
    return httpx2.post(f"{target.api}/completions", json=body, timeout=60).json()["choices"][0][
        "text"
    ]


def fill_pool(target: Server) -> None:
    """Lets the server make all threads that it ever has for reading texts: they come one by one, as
    more texts are read at a time than ever before.
    """
    body = {"prompt": "The lungs bring air to the blood. " * 4_000}

    def tokenize(_: int) -> int:
        return httpx2.post(f"{target.url}/tokenize", json=body, timeout=60).status_code

    with ThreadPoolExecutor(2 * POOL_THREADS) as pool:
        assert set(pool.map(tokenize, range(2 * POOL_THREADS))) == {200}


GONE_SECONDS = 5.0
"""Connections that were just closed take a moment to go; what leaked stays longer."""


def footprint(target: Server, *, before: dict[str, int] | None = None) -> dict[str, int]:
    """When idle; if it is to be compared, when no more is there than before, or after a while."""
    target.wait_idle()
    deadline = time.monotonic() + GONE_SECONDS
    while True:
        found = target.footprint()
        if before is None or time.monotonic() > deadline:
            return found
        if all(found[name] <= before[name] for name in ("threads", "descriptors")):
            return found
        time.sleep(0.1)


def disconnects(
    target: Server, *, requests: int, tokens: int, seed: int, together: int = 16
) -> dict[str, Any]:
    """Lets clients leave; what was there before and after."""
    # Threads and memory that stay for good: the first requests make them.
    fill_pool(target)
    every = departures(WARM_UP, seed=seed + 1, tokens=tokens, prompts=PROMPTS)
    asyncio.run(leave_all(target.url, every, together=together))
    expected = answer(target)
    time.sleep(0.5)
    before = footprint(target)
    start = time.monotonic()
    every = departures(requests, seed=seed, tokens=tokens, prompts=PROMPTS)
    statuses = asyncio.run(leave_all(target.url, every, together=together))
    seconds = time.monotonic() - start
    idle_seconds = target.wait_idle()
    is_equal = answer(target) == expected
    time.sleep(0.5)
    after = footprint(target, before=before)
    return {
        "requests": requests,
        "left_when": dict(Counter(str(one.when) for one in every)),
        "statuses_read": dict(Counter(str(one) for one in statuses if one is not None)),
        "seconds": seconds,
        "idle_after_seconds": idle_seconds,
        "left": target.taken(),
        "before": before,
        "after": after,
        "threads_leaked": after["threads"] - before["threads"],
        "descriptors_leaked": after["descriptors"] - before["descriptors"],
        "same_answer_afterwards": is_equal,
    }


def main(arguments: dict[str, str]) -> None:
    described = here()
    with server() as target:
        found = disconnects(
            target,
            requests=int(arguments.get("requests", 1000)),
            tokens=int(arguments.get("tokens", 1500)),
            seed=int(arguments.get("seed", 0)),
        )
    found["is_reached"] = (
        not any(found["left"].values())
        and found["threads_leaked"] <= 0
        and found["descriptors_leaked"] <= 0
        and found["same_answer_afterwards"]
    )
    keep("disconnects", found, arguments, described)


if __name__ == "__main__":
    main(dict(argument.split("=", 1) for argument in sys.argv[1:]))
