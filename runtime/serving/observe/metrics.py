"""Fills the metrics of one server: requests as events happen, the engine when it is scraped.

    metrics = ServerMetrics(model_name="m", max_running=8)
    service.add_observer(metrics)
    metrics.add_engine(EngineMonitor(model.moecast.engine), info=...)   # when the model is loaded
    body, content_type = metrics.render()

Each server has its own registry, so that two servers in one process are counted separately.
"""

import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from prometheus_client import (
    CONTENT_TYPE_PLAIN_0_0_4,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.core import Metric as MetricFamily
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

from runtime.engine.monitor import EngineMonitor
from runtime.serving.choice import CompletionChoice, FinishReason
from runtime.serving.errors import NotReady, QueueFull, RequestError
from runtime.serving.logs import count_dropped_lines
from runtime.serving.observe.metric_definitions import (
    DEFINITIONS,
    EXPERT_METRICS,
    REQUEST_METRICS,
    SERVER_INFO,
    MetricDefinition,
    MetricKind,
)
from runtime.serving.served_model import LoadedModel
from runtime.serving.service import ServiceObserver


class ServerMetrics(ServiceObserver):
    """The registry of one server, and its metrics of sequences: one answer to one prompt.

    Args:
        model_name: label of all metrics.
    """

    def __init__(self, *, model_name: str, max_running: int):
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self.loaded: LoadedModel | None = None
        """None while the model is loading."""
        self._max_running = max_running
        self._families = {one.name: build_family(one, self.registry) for one in REQUEST_METRICS}
        self._own_labels = {"model_name": model_name, "engine": "0"}
        self._lock = threading.Lock()
        self._waiting: set[CompletionChoice] = set()
        self._running: dict[CompletionChoice, tuple[int, float | None]] = {}
        """Tokens that the metrics include, and the time of the last one."""
        self.num_prompt_tokens = self.num_reused_tokens = self.num_generated_tokens = 0
        """Tokens processed since the start."""
        self.series("vllm:num_requests_waiting").set_function(lambda: len(self._waiting))
        self.series("vllm:num_requests_running").set_function(lambda: len(self._running))
        self.series("vllm:kv_cache_usage_perc").set_function(self._kv_cache_usage)
        self.series("moecast_kept_kv_bytes").set_function(lambda: self.num_kept_bytes)
        self.series("moecast_dropped_log_lines").set_function(count_dropped_lines)
        # From the start: a rate misses the first event of a series that appears with it.
        for metric in REQUEST_METRICS:
            if not set(metric.labels) - set(self._own_labels):
                self.series(metric.name)
        for reason in FinishReason:
            self.series("vllm:request_success_total", finished_reason=reason)
        for error in (QueueFull, NotReady):
            self.series("moecast_requests_rejected_total", status=str(error.status))

    def add_engine(self, monitor: EngineMonitor, *, info: Mapping[str, str]) -> None:
        """Expose the engine's counters too; called once.

        Args:
            info: labels `version`, `system`, `predictor` and `eviction` of the server.
        """
        labels = {"model_name": self._own_labels["model_name"], **info}
        self.registry.register(EngineCollector(monitor, labels))

    def render(self) -> tuple[bytes, str]:
        """The content and its type: always the text format, which every Prometheus reads.

        In OpenMetrics prometheus_client 0.26 would replace `vllm:` by `vllm_`, unless the scraper
        asks for another escaping, and dashboards would find nothing.
        """
        return generate_latest(self.registry), CONTENT_TYPE_PLAIN_0_0_4

    def series(self, name: str, **labels: str) -> Any:
        """The family's series with this server's labels and the given ones."""
        own = {key: self._own_labels[key] for key in DEFINITIONS[name].labels if key not in labels}
        return self._families[name].labels(**own, **labels)

    @property
    def num_kept_bytes(self) -> int:
        kept = None if self.loaded is None else self.loaded.kept
        return 0 if kept is None else kept.num_bytes

    def _kv_cache_usage(self) -> float:
        """NaN, Prometheus' "no value", for models without a longest sequence."""
        with self._lock:
            lengths = [choice.num_cached_tokens for choice in self._running]
        info = None if self.loaded is None else self.loaded.info
        if info is not None and info.kv_budget is not None:
            return info.kv_budget.bytes_of(lengths) / info.kv_budget.budget_bytes
        if info is None or info.max_length is None:
            return float("nan")
        return sum(lengths) / (self._max_running * info.max_length)

    # ---- events of the service

    def on_rejected(self, error: RequestError) -> None:
        self.series("moecast_requests_rejected_total", status=str(error.status)).inc()

    def on_queued(self, choice: CompletionChoice) -> None:
        with self._lock:
            self._waiting.add(choice)

    def on_started(self, choice: CompletionChoice) -> None:
        with self._lock:
            self._waiting.discard(choice)
            self._running[choice] = 0, None
        if choice.can_reuse_prefix and self.loaded is not None and self.loaded.kept is not None:
            self.num_reused_tokens += choice.num_reused
            self.series("vllm:prefix_cache_queries_total").inc(len(choice.prompt))
            self.series("vllm:prefix_cache_hits_total").inc(choice.num_reused)

    def on_step(self, seconds: float, choices: Sequence[CompletionChoice]) -> None:
        num_tokens = 0
        for choice in choices:
            counted, last_token_at = self._running.get(choice, (choice.num_tokens, None))
            if choice.num_tokens == counted or not choice.last_token_at:
                continue  # the pass computed the prompt's log-probabilities only
            if last_token_at is None:
                num_tokens += len(choice.prompt)
                self.num_prompt_tokens += len(choice.prompt)
                self.series("vllm:prompt_tokens_total").inc(len(choice.prompt))
                self._observe(
                    "time_to_first_token_seconds", choice.last_token_at - choice.arrived_at
                )
            else:
                num_tokens += 1
                self._observe("inter_token_latency_seconds", choice.last_token_at - last_token_at)
            self.num_generated_tokens += choice.num_tokens - counted
            self.series("vllm:generation_tokens_total").inc(choice.num_tokens - counted)
            self._running[choice] = choice.num_tokens, choice.last_token_at
        self._observe("iteration_tokens_total", num_tokens)
        self.series("moecast_group_size").set(len(choices))
        self.series("moecast_step_seconds").observe(seconds)

    def on_ended(self, choice: CompletionChoice) -> None:
        """Count a choice; one that never ran or had no token is missing in some durations."""
        assert choice.finish_reason is not None
        assert choice.ended_at is not None
        self.series("vllm:request_success_total", finished_reason=choice.finish_reason).inc()
        with self._lock:
            self._waiting.discard(choice)
            self._running.pop(choice, None)
        if choice.started_at is None:
            return
        self._observe("e2e_request_latency_seconds", choice.ended_at - choice.arrived_at)
        self._observe("request_queue_time_seconds", choice.started_at - choice.arrived_at)
        self._observe("request_inference_time_seconds", choice.ended_at - choice.started_at)
        if choice.first_token_at is not None and choice.last_token_at is not None:
            decode = choice.last_token_at - choice.first_token_at
            prefill = choice.first_token_at - choice.started_at
            self._observe("request_prefill_time_seconds", prefill)
            self._observe("request_decode_time_seconds", decode)
            if choice.tpot_seconds is not None:
                self._observe("request_time_per_output_token_seconds", choice.tpot_seconds)
        self._observe("request_prompt_tokens", len(choice.prompt))
        self._observe("request_generation_tokens", choice.num_tokens)
        self._observe("request_max_num_generation_tokens", choice.num_tokens)
        self._observe("request_params_max_tokens", choice.sampling.max_new_tokens)

    def _observe(self, name: str, value: float) -> None:
        self.series(f"vllm:{name}").observe(value)


def build_family(metric: MetricDefinition, registry: CollectorRegistry) -> Any:
    """The metric as an object of prometheus_client."""
    if metric.kind is MetricKind.HISTOGRAM:
        return Histogram(
            metric.name, metric.help, metric.labels, registry=registry, buckets=metric.buckets
        )
    cls = Counter if metric.kind is MetricKind.COUNTER else Gauge
    return cls(metric.name, metric.help, metric.labels, registry=registry)


class EngineCollector(Collector):
    """Reads the engine's counters at each scrape.

    Args:
        labels: all of `SERVER_INFO`.
    """

    def __init__(self, monitor: EngineMonitor, labels: Mapping[str, str]):
        self._monitor = monitor
        self._labels = labels

    def collect(self) -> Iterable[MetricFamily]:
        state, model_name = self._monitor.snapshot(), self._labels["model_name"]
        classes = {MetricKind.COUNTER: CounterMetricFamily, MetricKind.GAUGE: GaugeMetricFamily}
        for metric in EXPERT_METRICS:
            family = classes[metric.kind](metric.family, metric.help, labels=metric.labels)
            for labels, value in metric.read(state):
                family.add_metric([model_name, *labels], value)
            if metric is SERVER_INFO:
                family.add_metric([self._labels[label] for label in metric.labels], 1)
            yield family
