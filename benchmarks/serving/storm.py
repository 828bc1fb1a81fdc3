"""Many clients ask for long answers and leave at once; then one more request has to be answered.

The requests are sent together by clients that wait for half a second. The next request, for 10
tokens, must be answered within 5 seconds (vLLM's test_request_cancellation), and afterwards nothing
may run, wait or be pinned. The reference model's context is extended for the long answers.
"""

import asyncio
import tempfile
import time
from pathlib import Path

import httpx2

from benchmarks.reports import default_threads, describe_machine
from benchmarks.serving.config import StormConfig
from benchmarks.serving.rows import StormReport, StormRun, count_values, write_part
from benchmarks.serving.server import ENDED_COUNTER, ServerProcess, extend_context, run_server

CLIENT_SECONDS = 0.5
NEXT_TOKENS = 10
NEXT_SECONDS = 5.0
PROMPT = "The heart pumps blood through the body, and the lungs"
TOKENS_COUNTER = "vllm:generation_tokens_total"


async def send_requests(url: str, *, requests: int, tokens: int) -> list[str]:
    """Sends all requests at once; returns how each ended for its client."""
    body = {"prompt": PROMPT, "max_tokens": tokens, "ignore_eos": True, "temperature": 0}

    async def send(client: httpx2.AsyncClient) -> str:
        try:
            answer = await client.post(f"{url}/v1/completions", json=body)
        except httpx2.TimeoutException:
            return "timeout"
        return str(answer.status_code)

    limits = httpx2.Limits(max_connections=None)
    async with httpx2.AsyncClient(timeout=CLIENT_SECONDS, limits=limits) as client:
        return list(await asyncio.gather(*(send(client) for _ in range(requests))))


def send_storm(target: ServerProcess, *, requests: int, tokens: int) -> StormRun:
    """Sends one storm and the request after it."""
    before = target.metrics()
    ends = asyncio.run(send_requests(target.url, requests=requests, tokens=tokens))
    start = time.monotonic()
    body = {"prompt": PROMPT, "max_tokens": NEXT_TOKENS, "ignore_eos": True}
    answer = httpx2.post(f"{target.api}/completions", json=body, timeout=60)
    seconds = time.monotonic() - start
    idle_seconds = target.wait_idle()
    after = target.metrics()
    return StormRun(
        ends=count_values(ends),
        next_status=answer.status_code,
        next_tokens=answer.json().get("usage", {}).get("completion_tokens"),
        next_seconds=seconds,
        idle_after_seconds=idle_seconds,
        left=target.idle_gauges(),
        tokens_asked_for=requests * tokens,
        tokens_generated=after[TOKENS_COUNTER] - before.get(TOKENS_COUNTER, 0),
        answers_cancelled=after[ENDED_COUNTER] - before.get(ENDED_COUNTER, 0.0) - 1,
    )


def run_storm(config: StormConfig) -> None:
    machine = describe_machine(default_threads())
    with tempfile.TemporaryDirectory() as scratch:
        options = {
            "model.id": extend_context(Path(scratch) / "model", config.max_new_tokens + 64),
            "max_new_tokens": config.max_new_tokens,
            "max_waiting": config.requests,
        }
        with run_server(options) as target:
            # Loads and allocates what is needed once.
            send_storm(target, requests=2, tokens=config.max_new_tokens)
            runs = [
                send_storm(target, requests=config.requests, tokens=config.max_new_tokens)
                for _ in range(config.repetitions)
            ]
    worst = max(run.next_seconds for run in runs)
    report = StormReport(
        requests=config.requests,
        tokens=config.max_new_tokens,
        client_seconds=CLIENT_SECONDS,
        next_seconds_worst=worst,
        is_reached=worst <= NEXT_SECONDS
        and all(run.next_status == 200 and not any(run.left.values()) for run in runs),
        runs=runs,
    )
    write_part("storm", config, machine, report)
