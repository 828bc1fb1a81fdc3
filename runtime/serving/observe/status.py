"""The status of one server, which its page shows, with its last answers; fills its metrics."""

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

import psutil

from runtime.engine.monitor import EngineMonitor, EngineSnapshot
from runtime.serving.choice import CompletionChoice
from runtime.serving.config import ServeConfig
from runtime.serving.observe.metrics import ServerMetrics
from runtime.serving.observe.recording import PromptRecorder
from runtime.serving.service import GenerationService, ServiceObserver, ServiceState

WINDOW_ANSWERS = 256
"""Answers that the percentiles are of."""
LISTED_ANSWERS = 20
RATE_SECONDS = 10
"""Time that the throughput is a mean of: a slow model generates no token in most seconds."""
PERCENTS = (50, 90, 99)


class RecentAnswers(ServiceObserver):
    """Records answers as they end, without any of their text, and the tokens of the last seconds.

    Thread-safe.

    Args:
        count_tokens: returns the number of tokens generated since the start.
        clock: seconds that only grow.
        now: the current time in UTC.
    """

    def __init__(
        self,
        count_tokens: Callable[[], int],
        *,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ):
        self._count_tokens, self._clock, self._now = count_tokens, clock, now
        self._lock = threading.Lock()
        self._answers: deque[dict[str, Any]] = deque(maxlen=WINDOW_ANSWERS)
        """As `last` returns them. The answers of one request share its id."""
        self._totals: deque[tuple[int, int]] = deque([(0, 0)], maxlen=RATE_SECONDS + 2)
        """Seconds with their last total: those of the mean, this one, and one before."""

    def on_step(self, seconds: float, choices: list[CompletionChoice]) -> None:  # noqa: ARG002
        second = int(self._clock())
        with self._lock:
            if self._totals and self._totals[-1][0] == second:
                self._totals.pop()
            self._totals.append((second, self._count_tokens()))

    def on_ended(self, choice: CompletionChoice) -> None:
        assert choice.finish_reason is not None
        record = {
            "id": choice.request_id,
            "ended_at": self._now().isoformat(timespec="seconds"),
            "prompt_tokens": len(choice.prompt),
            "new_tokens": choice.num_tokens,
            "ttft_seconds": choice.ttft_seconds,
            "tpot_seconds": choice.tpot_seconds,
            "finish_reason": str(choice.finish_reason),
        }
        with self._lock:
            self._answers.append(record)

    def tokens_per_second(self) -> float:
        """Return the mean throughput of the last whole seconds, at most `RATE_SECONDS` of them."""
        second = int(self._clock())
        with self._lock:
            totals = list(self._totals)
        before, now = (
            max((total for at, total in totals if at < limit), default=0)
            for limit in (second - RATE_SECONDS, second)
        )
        return (now - before) / RATE_SECONDS

    def latencies(self) -> dict[str, Any]:
        """Return percentiles of TTFT and TPOT in seconds, and how many answers they are of."""
        with self._lock:
            answers = list(self._answers)
        return {"num_answers": len(answers)} | {
            name: percentiles([one[name] for one in answers if one[name] is not None])
            for name in ("ttft_seconds", "tpot_seconds")
        }

    def last(self) -> list[dict[str, Any]]:
        """Return the last `LISTED_ANSWERS` answers, the newest first."""
        with self._lock:
            return list(self._answers)[: -LISTED_ANSWERS - 1 : -1]


def percentiles(values: Sequence[float]) -> dict[str, float] | None:
    """Return p50, p90 and p99 by nearest rank, which are values that occurred; None for none."""
    if not values:
        return None
    ordered = sorted(values)
    return {
        f"p{percent}": ordered[math.ceil(percent / 100 * len(ordered)) - 1] for percent in PERCENTS
    }


TIER_FIELDS = ("name", "num_slots", "num_used", "num_pinned", "num_in_flight", "used_bytes",
               "budget_bytes")  # fmt: skip
"""Fields of `TierState` in the status."""


class Telemetry:
    """Metrics and status of one service; those of the engine from when the model is loaded.

    Create it before the service starts. `status` and `metrics` may be read from any thread.
    """

    def __init__(
        self,
        service: GenerationService,
        config: ServeConfig,
        *,
        version: str = "",
        recorder: PromptRecorder | None = None,
    ):
        self._service, self._config, self._version = service, config, version
        self._recorder = recorder
        self._started = time.monotonic()
        self._process = psutil.Process()
        self._monitor: EngineMonitor | None = None
        self._served: dict[str, Any] | None = None
        self.metrics = ServerMetrics(model_name=config.model.name, max_running=config.max_running)
        self.recent = RecentAnswers(lambda: self.metrics.num_generated_tokens)
        service.add_observer(self.metrics)
        service.add_observer(self.recent)
        service.on_state_change(self._on_state_change)

    def _on_state_change(self, state: ServiceState) -> None:
        """Called in the engine thread, which has loaded the model when the service is ready."""
        loaded, system = self._service.loaded, self._config.system
        if state is ServiceState.READY and loaded is not None:
            self.metrics.loaded = loaded
            handle = loaded.model.moecast
            monitor = EngineMonitor(handle.engine)
            names = {
                "system": system.name,
                "eviction": system.eviction,
                # The one in use: the model may have no zoo entry of the system's own.
                "predictor": handle.engine.driver.predictor_kind or "none",
            }
            self.metrics.add_engine(monitor, info={"version": self._version, **names})
            self._served = {
                **names,
                "num_layers": handle.spec.num_layers,
                "num_experts": handle.spec.num_experts,
                "top_k": handle.spec.top_k,
                "budget_bytes": handle.budget_bytes,
            }
            self._monitor = monitor

    def status(self) -> dict[str, Any]:
        """Totals since the start, the current state and the last answers.

        Until the model is loaded `served` is null, and the engine's fields are missing.
        """
        metrics, config = self.metrics, self._config
        status: dict[str, Any] = {
            "model": config.model.name,
            "version": self._version,
            "state": str(self._service.state),
            "uptime_seconds": time.monotonic() - self._started,
            "queue": {
                "running": self._service.num_running,
                "waiting": self._service.num_waiting,
                "max_running": config.max_running,
                "max_waiting": config.max_waiting,
            },
            "tokens": {
                "prompt": metrics.num_prompt_tokens,
                "reused": metrics.num_reused_tokens,
                "generated": metrics.num_generated_tokens,
                "generated_per_second": self.recent.tokens_per_second(),
            },
            "latency": self.recent.latencies(),
            "answers": self.recent.last(),
            "memory": {
                "resident_bytes": self._process.memory_info().rss,
                "kept_kv_bytes": metrics.num_kept_bytes,
            },
            "recording": self._recorder and self._recorder.status(),
            "served": self._served,
        }
        if self._monitor is not None:
            status |= engine_status(self._monitor.snapshot())
            status["cells"] = self._monitor.cells()
        return status


def engine_status(state: EngineSnapshot) -> dict[str, Any]:
    """The engine's part of the status, without `cells`."""
    drift = state.predictor_drift
    return {
        "experts": state.computing.as_dict() | {"hit_rate": state.computing.hit_rate},
        "bytes_from": count_sources(state),
        "layers": [
            {"requests": layer.requests, "hits": layer.hits, "recall": layer.recall}
            for layer in state.computing_layers
        ],
        "tiers": [{field: getattr(tier, field) for field in TIER_FIELDS} for tier in state.tiers],
        "seconds": {"stall": state.stall_seconds, "predictor": state.predictor_seconds},
        "prefetching": state.prefetching,
        "predictor_failures": state.predictor_failures,
        "predictor_drift": None if drift is None else asdict(drift),
        "faults": state.faults,
        "lost_threads": state.num_lost_threads,
    }


def count_sources(state: EngineSnapshot) -> dict[str, int]:
    """Return the bytes of experts that were read from the disk and copied from host memory."""
    has_host_tier = any(not tier.computes for tier in state.tiers)
    sources = {"disk": 0, "host": 0}
    for tier in state.tiers:
        source = "host" if tier.computes and has_host_tier else "disk"
        sources[source] += tier.total.bytes_moved
    return sources
