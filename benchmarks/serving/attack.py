"""Honest clients next to hostile ones, on a server with little memory.

Honest clients ask questions whose answers are known from the server alone, before the first attack:
each must be answered, with the same text and log-probabilities bit by bit. Refusals that say when
to come back (429, 503 with Retry-After) are asked again. Hostile clients go through all of
`hostile.ATTACKS` meanwhile. The memory limit is that of `benchmarks peers`: weights other than
experts + budget + 400 MiB, pages of the weights in the page cache included; a server whose
anonymous memory exceeds it is killed (Linux 6.5 or later, root).
"""

import asyncio
import http.client
import json
import random
import secrets
import statistics
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx2

from benchmarks.peers.limit import MemoryLimiter
from benchmarks.peers.run import ALLOWANCE_BYTES
from benchmarks.peers.weights import weight_bytes
from benchmarks.reports import describe_machine, print_line, write_part
from benchmarks.serving.config import AttackConfig
from benchmarks.serving.departures import fill_pool, idle_footprint
from benchmarks.serving.hostile import ATTACKS, BUSY, Statuses, Victim, run_hostile
from benchmarks.serving.rows import (
    AttackReport,
    FootprintSample,
    HealthReport,
    HonestCounts,
    LimitReport,
    ServerExit,
)
from benchmarks.serving.server import ServerFailed, ServerProcess, run_server
from runtime.config import ModelConfig
from runtime.policy.budget import Budget
from runtime.store.model_check import list_weight_files
from runtime.store.model_source import resolve

ANSWER_SECONDS = 600.0
HEALTH_SECONDS = 0.25
SAMPLE_SECONDS = 60.0
SETTLE_SECONDS = 3.0
EXTRA_SECONDS = 3600.0
"""Time beyond the attacks' after which the server is ended."""
PROMPTS = ("The heart pumps blood", "It was late in the evening", "Return a new list")
"""Honest prompts, in a chat too shorter than a server reuses: what it reuses changes last bits."""
QUESTIONS: tuple[tuple[str, dict[str, Any]], ...] = tuple(
    question
    for seed, prompt in enumerate(PROMPTS)
    for question in (
        ("completions", {"prompt": prompt, "temperature": 0, "logprobs": 3}),
        ("completions", {"prompt": prompt, "temperature": 0.8, "seed": seed, "stream": True}),
        ("completions", {"prompt": [prompt, prompt[:9]], "temperature": 1, "seed": 7, "n": 2}),
        ("completions", {"prompt": prompt, "temperature": 0, "echo": True, "logprobs": 1}),
        ("chat/completions", {"messages": [{"role": "user", "content": prompt}], "temperature": 0}),
        (
            "chat/completions",
            {"messages": [{"role": "user", "content": prompt}], "stream": True, "seed": seed},
        ),
    )
)
"""Paths and bodies; each gives the same answer every time."""
NEW_TOKENS = 16
HOSTILE = 4
"""Clients that attack, one way after another."""
BUDGET = "50%"
"""Memory for experts of the reference model."""
KV_BUDGET = "32MiB"
"""Part of the program's share of the memory limit; unless it is given, prompts of ended answers are
kept in the memory that the machine has."""


def read_choices(answer: httpx2.Response) -> list[Any]:
    """Returns the choices of an answer; of a streamed one, the text and the end of each."""
    if not answer.headers["content-type"].startswith("text/event-stream"):
        return answer.json()["choices"]
    texts: dict[int, str] = defaultdict(str)
    ends: dict[int, str] = {}
    events = [line[6:] for line in answer.text.splitlines() if line.startswith("data: ")]
    for event in events[:-1]:
        for choice in json.loads(event)["choices"]:
            texts[choice["index"]] += choice.get("text") or choice.get("delta", {}).get(
                "content", ""
            )
            if choice["finish_reason"]:
                ends[choice["index"]] = choice["finish_reason"]
    return [events[-1], dict(texts), ends]


async def ask_question(
    http: httpx2.AsyncClient, api: str, number: int, counts: HonestCounts
) -> list[Any] | None:
    """Asks until there is an answer; None for one that is neither an answer nor a refusal."""
    path, body = QUESTIONS[number]
    started = time.monotonic()
    counts.asked += 1
    failure = "never answered"
    while time.monotonic() < started + ANSWER_SECONDS:
        try:
            answer = await http.post(f"{api}/{path}", json=body | {"max_tokens": NEW_TOKENS})
        except httpx2.TransportError as error:
            failure = f"closed: {error}"
            break
        status = str(answer.status_code)
        if status in BUSY and (wait := answer.headers.get("retry-after", "")).isdigit():
            counts.refused[status] = counts.refused.get(status, 0) + 1
            await asyncio.sleep(int(wait))
        elif status == "200":
            counts.answered += 1
            counts.seconds_worst = max(counts.seconds_worst, time.monotonic() - started)
            return read_choices(answer)
        else:
            failure = f"{status}: {answer.text[:200]}"
            break
    counts.failed[failure] = counts.failed.get(failure, 0) + 1
    return None


async def learn_answers(api: str) -> list[list[Any] | None]:
    """Returns the answers to all questions, asked one after another."""
    async with httpx2.AsyncClient(timeout=ANSWER_SECONDS) as http:
        return [await ask_question(http, api, n, HonestCounts()) for n in range(len(QUESTIONS))]


async def run_honest(
    api: str, known: Sequence[Any], seed: int, goes_on: Callable[[], bool], counts: HonestCounts
) -> None:
    """Asks questions and compares their answers."""
    rng = random.Random(seed)
    async with httpx2.AsyncClient(timeout=ANSWER_SECONDS) as client:
        while goes_on():
            number = rng.randrange(len(QUESTIONS))
            answer = await ask_question(client, api, number, counts)
            counts.wrong += answer is not None and answer != known[number]


def probe_health(url: str, ends: threading.Event) -> HealthReport:
    """Requests /health until the event, in a separate thread, which no attack here delays."""
    seconds: list[float] = []
    failed = 0
    while not ends.wait(HEALTH_SECONDS):
        start = time.monotonic()
        connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=60)
        try:
            connection.request("GET", "/health")
            failed += connection.getresponse().status != 200
        except (OSError, http.client.HTTPException):
            failed += 1
        finally:
            connection.close()
        seconds.append(time.monotonic() - start)
    return HealthReport(
        probes=len(seconds),
        failed=failed,
        seconds_p99=statistics.quantiles(seconds, n=100)[98] if len(seconds) > 1 else 0.0,
        seconds_worst=max(seconds, default=0.0),
    )


@dataclass
class AttackLog:
    """Everything that was counted and sampled."""

    honest: HonestCounts = field(default_factory=HonestCounts)
    hostile: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    samples: list[FootprintSample] = field(default_factory=list)

    def note(self, name: str, statuses: Statuses) -> None:
        self.hostile[name].update(statuses)

    @property
    def unexpected(self) -> int:
        return sum(
            number
            for name, counts in self.hostile.items()
            for status, number in counts.items()
            if status not in ATTACKS[name].allowed | BUSY
        )


async def sample_minutes(
    target: ServerProcess, goes_on: Callable[[], bool], log: AttackLog
) -> None:
    start = time.monotonic()
    while goes_on():
        seconds = time.monotonic() - start
        log.samples.append(FootprintSample(**vars(target.footprint()), seconds=seconds))
        await asyncio.sleep(SAMPLE_SECONDS)


async def attack_server(
    target: ServerProcess, url: str, key: str, known: Sequence[Any], config: AttackConfig
) -> AttackLog:
    """Runs all clients together until the time is over, or the server has ended.

    Args:
        target: has the key in its URL; `url` is without it.
    """
    log, until = AttackLog(), time.monotonic() + 60 * config.minutes

    def goes_on() -> bool:
        return time.monotonic() < until and target.process.poll() is None

    sampling = asyncio.create_task(sample_minutes(target, goes_on, log))
    await asyncio.gather(
        *(
            run_honest(target.api, known, config.seed + n, goes_on, log.honest)
            for n in range(config.honest)
        ),
        *(
            run_hostile(Victim(url, key, random.Random(config.seed + n)), goes_on, log.note)
            for n in range(HOSTILE)
        ),
    )
    sampling.cancel()
    with suppress(asyncio.CancelledError):
        await sampling
    return log


async def warm_up(url: str, key: str) -> None:
    """Attacks once in each way: the first requests make threads and memory that stay."""
    victim = Victim(url, key, random.Random(0))
    for attack in ATTACKS.values():
        with suppress(ConnectionError):
            await attack.run(victim)


def memory_limit(model: Path) -> int:
    """Returns the bytes of weights other than experts, of the budget, and of everything else."""
    experts_bytes, others_bytes = weight_bytes(model)
    budget_bytes = Budget.parse(BUDGET).resolve(total_bytes=experts_bytes)
    return others_bytes + budget_bytes + ALLOWANCE_BYTES


def run_attack(config: AttackConfig) -> None:
    machine = describe_machine()
    model = resolve(ModelConfig())
    key = secrets.token_urlsafe(24)
    options = {"model.id": model, "budget": BUDGET, "kv_budget": KV_BUDGET}
    with (
        run_server(options, environment={"MOECAST_API_KEY": key}) as server,
        ThreadPoolExecutor(2) as pool,
    ):
        target = replace(server, url=server.url.replace("://", f"://:{key}@"))
        limiter = MemoryLimiter(server.process, list_weight_files(model), memory_limit(model))
        limiting: Future[None] = pool.submit(limiter.watch, 60 * config.minutes + EXTRA_SECONDS)
        try:
            known = asyncio.run(learn_answers(target.api))
            fill_pool(target)
            asyncio.run(warm_up(server.url, key))
            before = idle_footprint(target)
        except httpx2.TransportError as error:
            peak = limiter.peak.anonymous
            raise ServerFailed(
                f"ended before the attacks: {peak} bytes of {limiter.limit_bytes} allowed"
            ) from error
        ends = threading.Event()
        health = pool.submit(probe_health, server.url, ends)
        try:
            log = asyncio.run(attack_server(target, server.url, key, known, config))
        finally:
            ends.set()
        if (code := server.process.poll()) is None:
            target.wait_idle()
            time.sleep(SETTLE_SECONDS)
            after, left = idle_footprint(target, before), target.idle_gauges()
            ended = target.stop()
        else:
            after, left = log.samples[-1], {}
            ended = ServerExit(seconds=0.0, exit_code=code, children_left=0)
            print_line(server.log.read_text()[-2000:])
        limiting.result()
    report = AttackReport(
        minutes=config.minutes,
        honest=log.honest,
        hostile={name: dict(sorted(log.hostile[name].items())) for name in ATTACKS},
        unexpected=log.unexpected,
        health=health.result(),
        memory=LimitReport(
            limit_bytes=limiter.limit_bytes,
            peak_anonymous_bytes=limiter.peak.anonymous,
            peak_bytes=limiter.peak.total,
            was_killed=limiter.was_killed,
        ),
        before=before,
        after=after,
        left=left,
        threads_leaked=after.threads - before.threads,
        descriptors_leaked=after.descriptors - before.descriptors,
        ended=ended,
        samples=log.samples,
    )
    write_part(config, "attack", machine=machine, **vars(report), is_reached=report.is_reached)
    print_line(f"every honest request is answered, and nothing has grown: {report.is_reached}")
