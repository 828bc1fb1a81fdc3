"""SIGTERM while answers are generated: without a grace period, and with one.

Without it the process must end within 4.1 seconds (vLLM's test_shutdown); with it every accepted
request must be completed, no new one accepted, and no child process left.
"""

import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import httpx2

from benchmarks.reports import default_threads, describe_machine
from benchmarks.serving.config import ShutdownConfig
from benchmarks.serving.rows import (
    AbruptExit,
    GracefulExit,
    ShutdownReport,
    count_values,
    write_part,
)
from benchmarks.serving.server import (
    ENDED_COUNTER,
    RUNNING_GAUGE,
    WAITING_GAUGE,
    ServerProcess,
    run_server,
)

LIMIT_SECONDS = 4.1
GRACE_SECONDS = 300
"""Enough for all answers on a busy machine."""
PROMPT = "It was late in the evening when the old man came to the door and"


@dataclass(frozen=True)
class RequestEnd:
    """The end of a request for its client."""

    status: int | str
    """HTTP status, or the name of a transport error."""
    tokens: int

    def is_complete(self, tokens: int) -> bool:
        return self == RequestEnd(200, tokens)


def send_request(url: str, tokens: int) -> RequestEnd:
    """Asks for one answer of exactly that many tokens."""
    body = {"prompt": PROMPT, "max_tokens": tokens, "ignore_eos": True, "temperature": 0}
    try:
        answer = httpx2.post(f"{url}/v1/completions", json=body, timeout=600)
    except httpx2.TransportError as error:
        return RequestEnd(type(error).__name__, 0)
    return RequestEnd(
        answer.status_code, answer.json().get("usage", {}).get("completion_tokens", 0)
    )


def start_requests(
    target: ServerProcess, pool: ThreadPoolExecutor, requests: int, tokens: int
) -> list[Future[RequestEnd]]:
    """Returns when all requests are accepted; the first of them may have ended."""
    ended = target.metrics().get(ENDED_COUNTER, 0.0)
    futures = [pool.submit(send_request, target.url, tokens) for _ in range(requests)]
    deadline = time.monotonic() + 60
    while True:
        metrics = target.metrics()
        running, waiting = metrics[RUNNING_GAUGE], metrics[WAITING_GAUGE]
        if running + waiting + metrics.get(ENDED_COUNTER, 0.0) - ended == requests:
            return futures
        if time.monotonic() > deadline:
            raise TimeoutError(f"not accepted: {running:g} running, {waiting:g} waiting")
        time.sleep(0.02)


def stop_abruptly(target: ServerProcess, *, requests: int, tokens: int) -> AbruptExit:
    """Sends SIGTERM to a server that was started with grace=0."""
    with ThreadPoolExecutor(requests) as pool:
        futures = start_requests(target, pool, requests, tokens)
        ended = target.stop()
        statuses = [future.result().status for future in futures]
    return AbruptExit(**vars(ended), clients=count_values(statuses))


def stop_gracefully(target: ServerProcess, *, requests: int, tokens: int) -> GracefulExit:
    """Sends SIGTERM to a server that was started with a grace period."""
    late: list[int | str] = []
    over = threading.Event()

    def send_late_requests() -> None:
        # Begins when the server reports that it is shutting down.
        while not over.is_set():
            try:
                if httpx2.get(f"{target.url}/ready", timeout=5).status_code == 503:
                    late.append(send_request(target.url, 1).status)
            except httpx2.TransportError as error:
                late.append(type(error).__name__)
            time.sleep(0.02)

    with ThreadPoolExecutor(requests + 1) as pool:
        futures = start_requests(target, pool, requests, tokens)
        late_requests = pool.submit(send_late_requests)
        try:
            ended = target.stop(timeout_seconds=GRACE_SECONDS + 10)
        finally:
            over.set()
        late_requests.result()
        ends = [future.result() for future in futures]
    return GracefulExit(
        **vars(ended),
        accepted=requests,
        completed=sum(end.is_complete(tokens) for end in ends),
        late_answers=count_values(late),
        late_accepted=late.count(200),
    )


def run_shutdown(config: ShutdownConfig) -> None:
    machine = describe_machine(default_threads())
    abrupt: list[AbruptExit] = []
    graceful: list[GracefulExit] = []
    for _ in range(config.repetitions):
        with run_server({"grace": 0}) as target:
            abrupt.append(stop_abruptly(target, requests=config.requests, tokens=1500))
        with run_server({"grace": GRACE_SECONDS}) as target:
            graceful.append(
                stop_gracefully(target, requests=config.requests, tokens=config.max_new_tokens)
            )
    worst = max(run.seconds for run in abrupt)
    exits = [*abrupt, *graceful]
    report = ShutdownReport(
        requests=config.requests,
        seconds_worst_without_grace=worst,
        accepted=sum(run.accepted for run in graceful),
        completed=sum(run.completed for run in graceful),
        late_accepted=sum(run.late_accepted for run in graceful),
        children_left=sum(run.children_left for run in exits),
        is_reached=worst < LIMIT_SECONDS
        and all(run.accepted == run.completed for run in graceful)
        and not any(run.late_accepted for run in graceful)
        and not any(run.children_left or run.exit_code for run in exits),
        without_grace=abrupt,
        with_grace=graceful,
    )
    write_part("shutdown", config, machine, report)
