"""SIGTERM while answers are being generated: at once, and with time to complete them.

    python -m benchmarks.serving.shutdown

With `grace=0` the process must be gone within 4.1 seconds (vLLM's test_shutdown); with a grace
period everything that was accepted must be completed, nothing new accepted, no child left.
`requests=12`, `tokens=64`, `repetitions=3`.
"""

import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2

from benchmarks.serving.results import here, keep
from benchmarks.serving.server import ENDED, RUNNING, WAITING, Server, server

LIMIT_SECONDS = 4.1
GRACE_SECONDS = 300
"""Enough for everything on a busy machine: what is measured is that all is completed."""
PROMPT = "It was late in the evening when the old man came to the door and"


def ask(url: str, tokens: int) -> dict[str, Any]:
    """One answer of exactly so many tokens; how it ended."""
    body = {"prompt": PROMPT, "max_tokens": tokens, "ignore_eos": True, "temperature": 0}
    try:
        answer = httpx2.post(f"{url}/v1/completions", json=body, timeout=600)
    except httpx2.TransportError as error:
        return {"status": type(error).__name__, "tokens": 0}
    return {
        "status": answer.status_code,
        "tokens": answer.json().get("usage", {}).get("completion_tokens", 0),
    }


def load(target: Server, pool: ThreadPoolExecutor, requests: int, tokens: int) -> list[Any]:
    """Answers under way: all are accepted when this returns, the first of them perhaps complete."""
    ended = target.metrics().get(ENDED, 0.0)
    futures = [pool.submit(ask, target.url, tokens) for _ in range(requests)]
    deadline = time.monotonic() + 60
    while True:
        metrics = target.metrics()
        if metrics[RUNNING] + metrics[WAITING] + metrics.get(ENDED, 0.0) - ended == requests:
            return futures
        if time.monotonic() > deadline:
            raise TimeoutError(f"not accepted: {metrics[RUNNING]}, {metrics[WAITING]}")
        time.sleep(0.02)


def at_once(target: Server, *, requests: int, tokens: int) -> dict[str, Any]:
    """SIGTERM without grace; the server was started with grace=0."""
    with ThreadPoolExecutor(requests) as pool:
        futures = load(target, pool, requests, tokens)
        ended = target.end()
        told = [future.result()["status"] for future in futures]
    return ended | {"clients": {str(one): told.count(one) for one in sorted(set(told), key=str)}}


def gracefully(target: Server, *, requests: int, tokens: int) -> dict[str, Any]:
    """SIGTERM with grace; the server was started with enough of it."""
    late: list[Any] = []
    over = threading.Event()

    def knock() -> None:
        # From the moment in which the server says that it ends.
        while not over.is_set():
            try:
                if httpx2.get(f"{target.url}/ready", timeout=5).status_code == 503:
                    late.append(ask(target.url, 1)["status"])
            except httpx2.TransportError as error:
                late.append(type(error).__name__)
            time.sleep(0.02)

    with ThreadPoolExecutor(requests + 1) as pool:
        futures = load(target, pool, requests, tokens)
        knocking = pool.submit(knock)
        try:
            ended = target.end(timeout_seconds=GRACE_SECONDS + 10)
        finally:
            over.set()
        knocking.result()
        answers = [future.result() for future in futures]
    return ended | {
        "accepted": requests,
        "completed": sum(one == {"status": 200, "tokens": tokens} for one in answers),
        "late_answers": {str(one): late.count(one) for one in sorted(set(late), key=str)},
        "late_accepted": late.count(200),
    }


def main(arguments: dict[str, str]) -> None:
    described = here()
    requests = int(arguments.get("requests", 12))
    tokens = int(arguments.get("tokens", 64))
    now, graceful = [], []
    for _ in range(int(arguments.get("repetitions", 3))):
        with server({"grace": 0}) as target:
            now.append(at_once(target, requests=requests, tokens=1500))
        with server({"grace": GRACE_SECONDS}) as target:
            graceful.append(gracefully(target, requests=requests, tokens=tokens))
    worst = max(run["seconds"] for run in now)
    found = {
        "requests": requests,
        "seconds_worst_without_grace": worst,
        "accepted": sum(run["accepted"] for run in graceful),
        "completed": sum(run["completed"] for run in graceful),
        "late_accepted": sum(run["late_accepted"] for run in graceful),
        "children_left": sum(run["children_left"] for run in now + graceful),
        "is_reached": worst < LIMIT_SECONDS
        and all(run["accepted"] == run["completed"] for run in graceful)
        and not any(run["late_accepted"] for run in graceful)
        and not any(run["children_left"] or run["exit_code"] for run in now + graceful),
        "without_grace": now,
        "with_grace": graceful,
    }
    keep("shutdown", found, arguments, described)


if __name__ == "__main__":
    main(dict(argument.split("=", 1) for argument in sys.argv[1:]))
