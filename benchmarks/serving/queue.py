"""How fast a full server says so.

    python -m benchmarks.serving.queue

Two answers run and two wait; `requests=500` more, one after another and then eight at a time, must
each get 429 with Retry-After, the slowest of a hundred within 50 ms. What was accepted ends well.
"""

import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2
import numpy as np

from benchmarks.serving.results import here, keep
from benchmarks.serving.server import Server, server
from benchmarks.serving.shutdown import PROMPT, load

RUNNING = WAITING = 2
LIMIT_SECONDS = 0.050
TOGETHER = 8


def refused(client: httpx2.Client, url: str) -> dict[str, Any]:
    """One request more than there is room for."""
    start = time.monotonic()
    answer = client.post(f"{url}/v1/completions", json={"prompt": PROMPT, "max_tokens": 16})
    return {
        "seconds": time.monotonic() - start,
        "status": answer.status_code,
        "retry_after": answer.headers.get("retry-after"),
        "code": answer.json().get("error", {}).get("code"),
    }


def refusals(target: Server, *, requests: int, together: int) -> list[dict[str, Any]]:
    """Each over a connection that is kept, as clients do."""
    with (
        httpx2.Client(timeout=30) as client,
        ThreadPoolExecutor(together) as pool,
    ):
        return list(pool.map(lambda _: refused(client, target.url), range(requests)))


def summary(found: list[dict[str, Any]]) -> dict[str, Any]:
    times = [1e3 * one["seconds"] for one in found]
    statuses = [one["status"] for one in found]
    return {
        "requests": len(found),
        "statuses": {str(status): statuses.count(status) for status in sorted(set(statuses))},
        "with_retry_after": sum(one["retry_after"] is not None for one in found),
        **{f"p{share}_ms": float(np.percentile(times, share)) for share in (50, 99)},
        "max_ms": max(times),
    }


def full(target: Server, *, requests: int, tokens: int) -> dict[str, Any]:
    """Fills the server, knocks, and lets what was accepted end."""
    with ThreadPoolExecutor(RUNNING + WAITING) as pool:
        accepted = load(target, pool, RUNNING + WAITING, tokens)
        before = target.footprint()["rss_bytes"]
        one = refusals(target, requests=requests, together=1)
        several = refusals(target, requests=requests, together=TOGETHER)
        after = target.footprint()["rss_bytes"]
        still = sum(not future.done() for future in accepted)
        answers = [future.result() for future in accepted]
    return {
        "one_after_another": summary(one),
        f"{TOGETHER}_at_a_time": summary(several),
        "rss_growth_bytes": after - before,
        "accepted": len(answers),
        "still_under_way_at_the_end": still,
        "completed": sum(one == {"status": 200, "tokens": tokens} for one in answers),
    }


def main(arguments: dict[str, str]) -> None:
    described = here()
    requests = int(arguments.get("requests", 500))
    options = {"max_running": RUNNING, "max_waiting": WAITING}
    with server(options) as target:
        run = full(target, requests=requests, tokens=int(arguments.get("tokens", 500)))
    worst = max(run[name]["p99_ms"] for name in ("one_after_another", f"{TOGETHER}_at_a_time"))
    told = [run[name] for name in ("one_after_another", f"{TOGETHER}_at_a_time")]
    found = {
        "p99_ms_worst": worst,
        "is_reached": worst <= 1e3 * LIMIT_SECONDS
        and all(one["statuses"] == {"429": one["requests"]} for one in told)
        and all(one["with_retry_after"] == one["requests"] for one in told)
        and run["completed"] == run["accepted"],
        **run,
    }
    keep("queue", found, arguments, described)


if __name__ == "__main__":
    main(dict(argument.split("=", 1) for argument in sys.argv[1:]))
