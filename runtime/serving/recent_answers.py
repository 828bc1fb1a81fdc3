"""The last answers of a server: their latencies, percentiles and throughput, in bounded memory."""

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any

from runtime.serving.choice import CompletionChoice
from runtime.serving.service import ServiceObserver

WINDOW_ANSWERS = 256
"""Answers that the percentiles are of."""
LISTED_ANSWERS = 20
RATE_SECONDS = 10
"""Time that the throughput is a mean of: a slow model generates no token in most seconds."""
PERCENTS = (50, 90, 99)


@dataclass(frozen=True, kw_only=True)
class AnswerRecord:
    """One ended answer, without any of its text."""

    id: str
    """The request's id; the answers of one request share it."""
    ended_at: str
    """Time in UTC, ISO 8601."""
    prompt_tokens: int
    new_tokens: int
    ttft_seconds: float | None
    """From its arrival to its first token, in the queue too; None: it had no token."""
    tpot_seconds: float | None
    """Mean time of a token after the first; None: it had less than two."""
    finish_reason: str


class RecentAnswers(ServiceObserver):
    """Records answers as they end, and counts the tokens of the last seconds. Thread-safe.

    Args:
        clock: seconds that only grow.
        now: the current time in UTC.
    """

    def __init__(
        self,
        *,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ):
        self._clock, self._now = clock, now
        self._lock = threading.Lock()
        self._answers: deque[AnswerRecord] = deque(maxlen=WINDOW_ANSWERS)
        self._counted: dict[CompletionChoice, int] = {}
        """Tokens of running choices that are in the buckets."""
        self._tokens_of_second: deque[tuple[int, int]] = deque(maxlen=RATE_SECONDS + 1)

    def on_started(self, choice: CompletionChoice) -> None:
        with self._lock:
            self._counted[choice] = 0

    def on_step(self, seconds: float, choices: list[CompletionChoice]) -> None:  # noqa: ARG002
        with self._lock:
            new = 0
            for choice in choices:
                if choice in self._counted:
                    new += choice.num_tokens - self._counted[choice]
                    self._counted[choice] = choice.num_tokens
            second = int(self._clock())
            buckets = self._tokens_of_second
            before = buckets.pop()[1] if buckets and buckets[-1][0] == second else 0
            buckets.append((second, before + new))

    def on_ended(self, choice: CompletionChoice) -> None:
        record = describe_answer(choice, self._now())
        with self._lock:
            self._counted.pop(choice, None)
            self._answers.append(record)

    def tokens_per_second(self) -> float:
        """Return the mean throughput of the last whole seconds, at most `RATE_SECONDS` of them."""
        second = int(self._clock())
        with self._lock:
            return (
                sum(
                    tokens
                    for at, tokens in self._tokens_of_second
                    if second - RATE_SECONDS <= at < second
                )
                / RATE_SECONDS
            )

    def latencies(self) -> dict[str, Any]:
        """Return percentiles of TTFT and TPOT in seconds, and how many answers they are of."""
        with self._lock:
            answers = list(self._answers)
        values = {
            "ttft_seconds": [answer.ttft_seconds for answer in answers],
            "tpot_seconds": [answer.tpot_seconds for answer in answers],
        }
        return {"num_answers": len(answers)} | {
            name: percentiles([value for value in known if value is not None])
            for name, known in values.items()
        }

    def last(self) -> list[dict[str, Any]]:
        """Return the last `LISTED_ANSWERS` answers, the newest first."""
        with self._lock:
            answers = list(self._answers)[-LISTED_ANSWERS:]
        return [asdict(answer) for answer in reversed(answers)]


def describe_answer(choice: CompletionChoice, now: datetime) -> AnswerRecord:
    """Return the record of a choice that has ended."""
    first, last = choice.first_token_at, choice.last_token_at
    ttft = tpot = None
    if first is not None and last is not None:
        ttft = first - choice.arrived_at
        if choice.num_tokens > 1:
            tpot = (last - first) / (choice.num_tokens - 1)
    assert choice.finish_reason is not None
    return AnswerRecord(
        id=choice.request_id,
        ended_at=now.isoformat(timespec="seconds"),
        prompt_tokens=len(choice.prompt),
        new_tokens=choice.num_tokens,
        ttft_seconds=ttft,
        tpot_seconds=tpot,
        finish_reason=str(choice.finish_reason),
    )


def percentiles(values: Sequence[float]) -> dict[str, float] | None:
    """Return p50, p90 and p99 by nearest rank, which are values that occurred; None for none."""
    if not values:
        return None
    ordered = sorted(values)
    return {
        f"p{percent}": ordered[math.ceil(percent / 100 * len(ordered)) - 1] for percent in PERCENTS
    }
