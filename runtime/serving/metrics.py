"""What `/metrics` says: requests as they pass, and the engine as it is when it is asked.

    metrics = Metrics(model_name="m", max_running=8)
    service = Service(..., observers=[metrics.requests])
    metrics.watch(Monitor(model.moecast.engine), info=...)   # when the model is loaded
    body, content_type = metrics.render()

Each server has a registry of its own: two in one process do not add up.
"""

import threading
from collections.abc import Mapping, Sequence
from typing import Any

from prometheus_client import (
    CONTENT_TYPE_PLAIN_0_0_4,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    generate_latest,
)
from prometheus_client.process_collector import ProcessCollector

from runtime.engine.monitor import EngineMonitor
from runtime.serving.caches import CacheBudget
from runtime.serving.choice import Choice, Reason
from runtime.serving.errors import RequestError
from runtime.serving.expert_metrics import ExpertMetrics
from runtime.serving.metric_names import METRICS, REQUESTS, Kind, Metric
from runtime.serving.observer import Observer


class Metrics:
    """One server's registry.

    Args:
        model_name: label of everything.
        max_running: sequences that may run at once.
        context_tokens: the longest sequence that is served; None until it is known.
    """

    def __init__(self, *, model_name: str, max_running: int, context_tokens: int | None = None):
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self.model_name = model_name
        self.requests = RequestMetrics(
            self.registry,
            model_name=model_name,
            max_running=max_running,
            context_tokens=context_tokens,
        )

    def watch(self, monitor: EngineMonitor, *, info: Mapping[str, str]) -> None:
        """From now on the engine's counters are told too; called once.

        Args:
            info: labels `version`, `system`, `predictor`, `eviction` of what is served.
        """
        self.registry.register(ExpertMetrics(monitor, model_name=self.model_name, info=info))

    def render(self) -> tuple[bytes, str]:
        """The body and its content type: always the text format, which every Prometheus reads.

        prometheus_client 0.26 writes OpenMetrics with `vllm_` for `vllm:` unless the scraper asks
        for other escaping, and dashboards would find nothing.
        """
        return generate_latest(self.registry), CONTENT_TYPE_PLAIN_0_0_4


class RequestMetrics(Observer):
    """What happens to sequences: one prompt's one answer, as vLLM counts."""

    def __init__(
        self,
        registry: CollectorRegistry,
        *,
        model_name: str,
        max_running: int,
        context_tokens: int | None = None,
    ):
        """Arguments as for `Metrics`."""
        self.context_tokens = context_tokens
        self.caches: CacheBudget | None = None
        """What bounds them, if their bytes are."""
        self._max_running = max_running
        self._families = {one.name: made(one, registry) for one in REQUESTS}
        self._own_labels = {"model_name": model_name, "engine": "0"}
        self._lock = threading.Lock()
        self._waiting: set[Choice] = set()
        self._running: dict[Choice, _Told] = {}
        self.num_prompt_tokens = self.num_generated_tokens = 0
        """Processed since the start."""
        self.of("vllm:num_requests_waiting").set_function(lambda: self.num_waiting)
        self.of("vllm:num_requests_running").set_function(lambda: self.num_running)
        self.of("vllm:kv_cache_usage_perc").set_function(self._cache_usage)
        # From the start: a rate misses the first event of a series that appears with it.
        for metric in REQUESTS:
            if not set(metric.labels) - set(self._own_labels):
                self.of(metric.name)
        for reason in Reason:
            self.of("vllm:request_success_total", finished_reason=reason)

    def of(self, name: str, **labels: str) -> Any:
        """The family's series with this server's labels and the given ones."""
        own = {key: self._own_labels[key] for key in METRICS[name].labels if key not in labels}
        return self._families[name].labels(**own, **labels)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    def _cache_usage(self) -> float:
        """NaN, which Prometheus knows as "no value", for models without a longest sequence."""
        with self._lock:
            held = [choice.num_cached for choice in self._running]
        if self.caches is not None:
            return self.caches.bytes_of(held) / self.caches.budget_bytes
        if self.context_tokens is None:
            return float("nan")
        return sum(held) / (self._max_running * self.context_tokens)

    # ---- the service's observer

    def refused(self, error: RequestError) -> None:
        self.of("moecast_requests_rejected_total", status=str(error.status)).inc()

    def queued(self, choice: Choice) -> None:
        with self._lock:
            self._waiting.add(choice)

    def started(self, choice: Choice) -> None:
        with self._lock:
            self._waiting.discard(choice)
            self._running[choice] = _Told()

    def stepped(self, seconds: float, choices: Sequence[Choice]) -> None:
        num_passed = 0
        for choice in choices:
            told = self._running.get(choice)
            if told is None or choice.num_tokens == told.num_tokens or not choice.last_token_at:
                continue  # a pass over the prompt alone
            if told.last_token_at is None:
                num_passed += len(choice.prompt)
                self._produced(prompt_tokens=len(choice.prompt))
                self._observe("time_to_first_token_seconds", choice.last_token_at - choice.asked_at)
            else:
                num_passed += 1
                gap = choice.last_token_at - told.last_token_at
                self._observe("inter_token_latency_seconds", gap)
            self._produced(generated_tokens=choice.num_tokens - told.num_tokens)
            told.num_tokens, told.last_token_at = choice.num_tokens, choice.last_token_at
        self._observe("iteration_tokens_total", num_passed)
        self.of("moecast_group_size").set(len(choices))
        self.of("moecast_step_seconds").observe(seconds)

    def ended(self, choice: Choice) -> None:
        """One that never ran, or gave no token, adds to no duration that it does not have."""
        assert choice.reason is not None
        assert choice.ended_at is not None
        self.of("vllm:request_success_total", finished_reason=choice.reason).inc()
        with self._lock:
            self._waiting.discard(choice)
            self._running.pop(choice, None)
        if choice.started_at is None:
            return
        self._observe("e2e_request_latency_seconds", choice.ended_at - choice.asked_at)
        self._observe("request_queue_time_seconds", choice.started_at - choice.asked_at)
        self._observe("request_inference_time_seconds", choice.ended_at - choice.started_at)
        if choice.first_token_at is not None and choice.last_token_at is not None:
            decode = choice.last_token_at - choice.first_token_at
            prefill = choice.first_token_at - choice.started_at
            self._observe("request_prefill_time_seconds", prefill)
            self._observe("request_decode_time_seconds", decode)
            if choice.num_tokens > 1:
                each = decode / (choice.num_tokens - 1)
                self._observe("request_time_per_output_token_seconds", each)
        self._observe("request_prompt_tokens", len(choice.prompt))
        self._observe("request_generation_tokens", choice.num_tokens)
        self._observe("request_max_num_generation_tokens", choice.num_tokens)
        self._observe("request_params_max_tokens", choice.sampling.max_new_tokens)

    def _observe(self, name: str, value: float) -> None:
        self.of(f"vllm:{name}").observe(value)

    def _produced(self, *, prompt_tokens: int = 0, generated_tokens: int = 0) -> None:
        self.num_prompt_tokens += prompt_tokens
        self.num_generated_tokens += generated_tokens
        self.of("vllm:prompt_tokens_total").inc(prompt_tokens)
        self.of("vllm:generation_tokens_total").inc(generated_tokens)


class _Told:
    """What has been counted of a running choice."""

    num_tokens = 0
    last_token_at: float | None = None


def made(metric: Metric, registry: CollectorRegistry) -> Any:
    """The family as prometheus_client has it."""
    if metric.kind is Kind.HISTOGRAM:
        return Histogram(
            metric.name, metric.help, metric.labels, registry=registry, buckets=metric.buckets
        )
    cls = Counter if metric.kind is Kind.COUNTER else Gauge
    return cls(metric.name, metric.help, metric.labels, registry=registry)
