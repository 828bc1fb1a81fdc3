"""Latency of a full server's refusals.

Two answers run and two wait; more requests, one after another and then eight at a time, must each
get 429 with Retry-After, the 99th percentile within 50 ms. The accepted requests must complete.
"""

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import httpx2
import numpy as np

from benchmarks.reports import default_threads, describe_machine
from benchmarks.serving.config import QueueConfig
from benchmarks.serving.rows import QueueReport, QueueRun, Refusals, count_values, write_part
from benchmarks.serving.server import ServerProcess, run_server
from benchmarks.serving.shutdown import PROMPT, start_requests

RUNNING = WAITING = 2
LIMIT_SECONDS = 0.050
TOGETHER = 8


@dataclass(frozen=True)
class RefusedAnswer:
    seconds: float
    status: int
    retry_after: str | None


def send_refused(client: httpx2.Client, url: str) -> RefusedAnswer:
    """Sends a request to the full server."""
    start = time.monotonic()
    answer = client.post(f"{url}/v1/completions", json={"prompt": PROMPT, "max_tokens": 16})
    seconds = time.monotonic() - start
    return RefusedAnswer(seconds, answer.status_code, answer.headers.get("retry-after"))


def measure_refusals(target: ServerProcess, *, requests: int, together: int) -> Refusals:
    """Sends requests over connections that are kept, as clients do."""
    with (
        httpx2.Client(timeout=30) as client,
        ThreadPoolExecutor(together) as pool,
    ):
        answers = list(pool.map(lambda _: send_refused(client, target.url), range(requests)))
    times = [1e3 * answer.seconds for answer in answers]
    return Refusals(
        requests=len(answers),
        statuses=count_values([answer.status for answer in answers]),
        with_retry_after=sum(answer.retry_after is not None for answer in answers),
        p50_ms=float(np.percentile(times, 50)),
        p99_ms=float(np.percentile(times, 99)),
        max_ms=max(times),
    )


def measure_full_queue(target: ServerProcess, *, requests: int, tokens: int) -> QueueRun:
    """Fills the server, sends more requests, and waits for the accepted ones."""
    with ThreadPoolExecutor(RUNNING + WAITING) as pool:
        accepted = start_requests(target, pool, RUNNING + WAITING, tokens)
        before = target.footprint().rss_bytes
        alone = measure_refusals(target, requests=requests, together=1)
        together = measure_refusals(target, requests=requests, together=TOGETHER)
        after = target.footprint().rss_bytes
        still = sum(not future.done() for future in accepted)
        ends = [future.result() for future in accepted]
    return QueueRun(
        one_after_another=alone,
        eight_at_a_time=together,
        rss_growth_bytes=after - before,
        accepted=len(ends),
        still_under_way_at_the_end=still,
        completed=sum(end.is_complete(tokens) for end in ends),
    )


def run_queue(config: QueueConfig) -> None:
    machine = describe_machine(default_threads())
    with run_server({"max_running": RUNNING, "max_waiting": WAITING}) as target:
        run = measure_full_queue(target, requests=config.requests, tokens=config.max_new_tokens)
    both = (run.one_after_another, run.eight_at_a_time)
    worst = max(refusals.p99_ms for refusals in both)
    report = QueueReport(
        **vars(run),
        p99_ms_worst=worst,
        is_reached=worst <= 1e3 * LIMIT_SECONDS
        and all(refusals.statuses == {"429": refusals.requests} for refusals in both)
        and all(refusals.with_retry_after == refusals.requests for refusals in both)
        and run.completed == run.accepted,
    )
    write_part("queue", config, machine, report)
