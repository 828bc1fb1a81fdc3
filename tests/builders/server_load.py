"""Requests to a server that is another process, while it is full or ends."""

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

import httpx2

from benchmarks.serving.server import RUNNING_GAUGE, WAITING_GAUGE, ServerProcess
from tests.builders.waiting import wait_for

ENDED_COUNTER = "vllm:request_success_total"
PROMPT = "It was late in the evening when the old man came to the door and"


@dataclass(frozen=True)
class RequestEnd:
    """The end of a request for its client."""

    status: int | str
    """HTTP status, or the name of a transport error."""
    tokens: int = 0


def complete(url: str, tokens: int, *, timeout: float = 600) -> RequestEnd:
    """Asks for one answer of exactly that many tokens."""
    body = {"prompt": PROMPT, "max_tokens": tokens, "ignore_eos": True, "temperature": 0}
    try:
        # Without certificates, which take a tenth of a second to load and which nothing here needs.
        answer = httpx2.post(f"{url}/v1/completions", json=body, timeout=timeout, verify=False)
    except httpx2.TransportError as error:
        return RequestEnd(type(error).__name__)
    usage = answer.json().get("usage", {})
    return RequestEnd(answer.status_code, usage.get("completion_tokens", 0))


@contextmanager
def accepted_requests(target: ServerProcess, number: int, *, tokens: int) -> Iterator[list[Future]]:
    """Yields when the server has accepted all requests; waits for their ends after the block."""

    def count_accepted() -> float:
        metrics = target.metrics()
        return metrics[RUNNING_GAUGE] + metrics[WAITING_GAUGE] + metrics.get(ENDED_COUNTER, 0.0)

    # The end of a request before may be counted after its client has read it.
    before = count_accepted()
    with ThreadPoolExecutor(number) as pool:
        ends = [pool.submit(complete, target.url, tokens) for _ in range(number)]

        def are_accepted() -> bool:
            return count_accepted() - before == number

        wait_for(are_accepted, f"{number} requests are accepted", seconds=60)
        yield ends


@contextmanager
def asking(clients: int, ask: Callable[[], object]) -> Iterator[None]:
    """Clients that ask again and again until the block ends; what one of them raises is raised."""
    over = threading.Event()

    def ask_again() -> None:
        while not over.is_set():
            ask()

    with ThreadPoolExecutor(clients) as pool:
        running = [pool.submit(ask_again) for _ in range(clients)]
        try:
            yield
        finally:
            over.set()
    for client in running:
        client.result()


@contextmanager
def late_requests(target: ServerProcess) -> Iterator[Counter[int | str]]:
    """Asks from when the server says that it ends until the block does; yields the answers."""
    late: Counter[int | str] = Counter()

    def ask() -> None:
        time.sleep(0.02)
        try:
            if httpx2.get(f"{target.url}/ready", timeout=5).status_code == 503:
                late[complete(target.url, 1).status] += 1
        except httpx2.TransportError as error:
            late[type(error).__name__] += 1

    with asking(1, ask):
        yield late
