"""Observes one server: fills its metrics and reports the status that its page shows."""

import time
from dataclasses import asdict
from typing import Any

import psutil

from runtime.engine.monitor import EngineMonitor, EngineSnapshot
from runtime.serving.config import ServeConfig
from runtime.serving.metrics import ServerMetrics
from runtime.serving.recent_answers import RecentAnswers
from runtime.serving.recording import PromptRecorder
from runtime.serving.service import GenerationService, ServiceState

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
        self._service = service
        self._recorder = recorder
        self._model_name = config.model.name
        self._version = version
        self._queue = {"max_running": config.max_running, "max_waiting": config.max_waiting}
        self._names = {"system": config.system.name, "eviction": config.system.eviction}
        self._started = time.monotonic()
        self._process = psutil.Process()
        self._monitor: EngineMonitor | None = None
        self._served: dict[str, Any] | None = None
        self.metrics = ServerMetrics(model_name=self._model_name, max_running=config.max_running)
        self.recent = RecentAnswers()
        service.add_observer(self.metrics.requests)
        service.add_observer(self.recent)
        service.on_state_change(self._on_state_change)

    def _on_state_change(self, state: ServiceState) -> None:
        """Called in the engine thread, which has loaded the model when the service is ready."""
        loaded = self._service.loaded
        if state is ServiceState.READY and loaded is not None:
            self.metrics.requests.max_length = loaded.info.max_length
            self.metrics.requests.kv_budget = loaded.info.kv_budget
            handle = loaded.model.moecast
            monitor = EngineMonitor(handle.engine)
            # The predictor in use: the model may have no zoo entry of the system's own.
            names = {**self._names, "predictor": handle.engine.driver.predictor_kind or "none"}
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
        requests = self.metrics.requests
        status: dict[str, Any] = {
            "model": self._model_name,
            "version": self._version,
            "state": str(self._service.state),
            "uptime_seconds": time.monotonic() - self._started,
            "queue": {"running": requests.num_running, "waiting": requests.num_waiting}
            | self._queue,
            "tokens": {
                "prompt": requests.num_prompt_tokens,
                "generated": requests.num_generated_tokens,
                "generated_per_second": self.recent.tokens_per_second(),
            },
            "latency": self.recent.latencies(),
            "answers": self.recent.last(),
            "memory": {"resident_bytes": self._process.memory_info().rss},
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
