"""What is told of a server while it runs: Prometheus metrics, and the status that its page shows.

`attach` before the service starts; the rest may be asked at any time, in any thread.
"""

import time
from typing import Any

import psutil
from transformers import PreTrainedModel

from runtime.engine.monitor import EngineMonitor, EngineSnapshot
from runtime.serving.metrics import Metrics
from runtime.serving.service import Service, State


class Watch:
    """Looks at one server; at the engine from when the model is loaded.

    Args:
        model_name: what clients call the model.
        system: name of the system that serves it, as in `system=NAME`.
        eviction: name of its eviction policy.
    """

    def __init__(
        self,
        *,
        model_name: str,
        max_running: int,
        max_waiting: int,
        system: str,
        eviction: str,
        version: str = "",
    ):
        self.metrics = Metrics(model_name=model_name, max_running=max_running)
        self._model_name = model_name
        self._queue = {"max_running": max_running, "max_waiting": max_waiting}
        self._names = {"system": system, "eviction": eviction}
        self._version = version
        self._started = time.monotonic()
        self._process = psutil.Process()
        self._service: Service | None = None
        self._monitor: EngineMonitor | None = None
        self._served: dict[str, Any] | None = None

    def attach(self, service: Service) -> None:
        """Has the service tell what it does from now on."""
        self._service = service
        service.add_observer(self.metrics.requests)
        service.on_change(self._changed)

    def _changed(self, state: State) -> None:
        """In the engine thread, which has loaded the model when the service becomes ready."""
        assert self._service is not None
        served = self._service.served
        if state is State.READY and served is not None:
            self.metrics.requests.context_tokens = served.facts.longest
            self.metrics.requests.caches = served.facts.caches
            self.observe(served.model)

    def observe(self, model: PreTrainedModel) -> None:
        """From now on the engine of this served model is looked at, too."""
        handle = model.moecast
        monitor = EngineMonitor(handle.engine)
        # What really forecasts: the system's predictor may have had no entry for the model.
        names = {**self._names, "predictor": handle.engine.driver.forecasts_with or "none"}
        self.metrics.watch(monitor, info={"version": self._version, **names})
        self._served = {
            **names,
            "num_layers": handle.spec.num_layers,
            "num_experts": handle.spec.num_experts,
            "top_k": handle.spec.top_k,
            "budget_bytes": handle.budget_bytes,
        }
        self._monitor = monitor

    def status(self) -> dict[str, Any]:
        """Sums since the start, and states of this moment.

        `served` is null until the model is loaded, and what the engine says is not there at all.
        """
        requests, service = self.metrics.requests, self._service
        said: dict[str, Any] = {
            "model": self._model_name,
            "version": self._version,
            "state": None if service is None else str(service.state),
            "uptime_seconds": time.monotonic() - self._started,
            "queue": {
                "running": requests.num_running,
                "waiting": requests.num_waiting,
                **self._queue,
            },
            "tokens": {
                "prompt": requests.num_prompt_tokens,
                "generated": requests.num_generated_tokens,
            },
            "memory": {"resident_bytes": self._process.memory_info().rss},
            "served": self._served,
        }
        if self._monitor is not None:
            said |= engine_status(self._monitor.snapshot())
            said["cells"] = self._monitor.cells()
        return said


def engine_status(state: EngineSnapshot) -> dict[str, Any]:
    """The engine's part of the status, without `cells`."""
    return {
        "experts": state.computing.as_dict(),
        "layers": [
            {"requests": one.requests, "hits": one.hits, "recall": one.recall}
            for one in state.computing_layers
        ],
        "tiers": [
            {
                "name": tier.name,
                "num_slots": tier.num_slots,
                "num_used": tier.num_used,
                "num_pinned": tier.num_pinned,
                "num_in_flight": tier.num_in_flight,
                "used_bytes": tier.used_bytes,
                "budget_bytes": tier.budget_bytes,
            }
            for tier in state.tiers
        ],
        "seconds": {"stall": state.stall_seconds, "predictor": state.predictor_seconds},
        "prefetching": state.prefetching,
        "faults": state.faults,
        "lost_threads": state.num_lost_threads,
    }
