"""The table of all metrics that `/metrics` exposes.

Names that begin with `vllm:` are vLLM's, with its labels, units and buckets (vllm/v1/metrics/
loggers.py in vLLM's repository), so that vLLM's dashboards work with this server. Other names begin
with `moecast_`: Prometheus reserves colons for recording rules.
"""

from dataclasses import dataclass
from enum import StrEnum

TTFT_BUCKETS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0),
    *(2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
TOKEN_BUCKETS = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
REQUEST_BUCKETS = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0),
    *(40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
STEP_BUCKETS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
LENGTH_BUCKETS = tuple(float(m * 10**power) for power in range(6) for m in (1, 2, 5))
"""vLLM ends these at the model's context length, which is unknown when the server starts."""

MODEL = ("model_name", "engine")
"""Labels of all vLLM metrics; there is one engine, "0"."""


class MetricKind(StrEnum):
    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True)
class MetricDefinition:
    """One metric family."""

    name: str
    """Name in queries; a histogram's series append `_bucket`, `_sum` and `_count`."""
    kind: MetricKind
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()
    """Upper bounds of a histogram."""

    @property
    def family(self) -> str:
        """The family's name, without the suffix of a counter's samples."""
        return self.name.removesuffix("_total") if self.kind is MetricKind.COUNTER else self.name


def _counter(name: str, help_text: str, *labels: str) -> MetricDefinition:
    return MetricDefinition(name, MetricKind.COUNTER, help_text, labels)


def _gauge(name: str, help_text: str, *labels: str) -> MetricDefinition:
    return MetricDefinition(name, MetricKind.GAUGE, help_text, labels)


def _histogram(
    name: str, help_text: str, buckets: tuple[float, ...] = LENGTH_BUCKETS
) -> MetricDefinition:
    return MetricDefinition(name, MetricKind.HISTOGRAM, help_text, MODEL, buckets)


REQUEST_METRICS = (
    _gauge("vllm:num_requests_running", "Number of sequences that are running.", *MODEL),
    _gauge("vllm:num_requests_waiting", "Number of sequences that are waiting.", *MODEL),
    _gauge(
        "vllm:kv_cache_usage_perc",
        "KV-cache usage, 0 to 1: bytes of running sequences divided by kv_budget; without a "
        "kv_budget, their tokens divided by max_running times the model's context length.",
        *MODEL,
    ),
    _counter("vllm:prompt_tokens_total", "Number of prompt tokens processed.", *MODEL),
    _counter("vllm:generation_tokens_total", "Number of tokens generated.", *MODEL),
    _counter(
        "vllm:request_success_total",
        "Number of sequences that ended, by reason: stop, length, abort (the client disconnected "
        "or the request was cancelled), error.",
        *MODEL,
        "finished_reason",
    ),
    _histogram("vllm:request_prompt_tokens", "Number of prompt tokens per sequence."),
    _histogram("vllm:request_generation_tokens", "Number of generated tokens per sequence."),
    _histogram(
        "vllm:request_max_num_generation_tokens",
        "Same as vllm:request_generation_tokens: each sequence is counted separately.",
    ),
    _histogram("vllm:request_params_max_tokens", "max_tokens of each sequence."),
    _histogram("vllm:iteration_tokens_total", "Number of tokens per forward pass.", STEP_BUCKETS),
    _histogram(
        "vllm:time_to_first_token_seconds",
        "Time to first token (TTFT): from arrival to the first token.",
        TTFT_BUCKETS,
    ),
    _histogram(
        "vllm:inter_token_latency_seconds",
        "Time between two consecutive tokens of a sequence.",
        TOKEN_BUCKETS,
    ),
    _histogram(
        "vllm:request_time_per_output_token_seconds",
        "Time per output token (TPOT): mean over a sequence's tokens after the first.",
        TOKEN_BUCKETS,
    ),
    _histogram(
        "vllm:e2e_request_latency_seconds", "Time from arrival to the end.", REQUEST_BUCKETS
    ),
    _histogram("vllm:request_queue_time_seconds", "Time in the queue.", REQUEST_BUCKETS),
    _histogram("vllm:request_inference_time_seconds", "Time from start to end.", REQUEST_BUCKETS),
    _histogram(
        "vllm:request_prefill_time_seconds",
        "Time from start to the first token.",
        REQUEST_BUCKETS,
    ),
    _histogram(
        "vllm:request_decode_time_seconds",
        "Time from the first to the last token.",
        REQUEST_BUCKETS,
    ),
    _counter(
        "moecast_requests_rejected_total",
        "Number of requests rejected before they were queued, by HTTP status.",
        "model_name",
        "status",
    ),
    MetricDefinition(
        "moecast_step_seconds",
        MetricKind.HISTOGRAM,
        "Time of one forward pass of all running sequences, including sampling.",
        ("model_name",),
        TOKEN_BUCKETS,
    ),
    _gauge("moecast_group_size", "Number of sequences in the last forward pass.", "model_name"),
)
"""Metrics that `runtime.serving.metrics.RequestMetrics` fills."""

EXPERT_METRICS = (
    _counter(
        "moecast_expert_cache_hits_total",
        "Number of requested experts that were complete in the tier.",
        "model_name",
        "tier",
        "layer",
    ),
    _counter(
        "moecast_expert_cache_joins_total",
        "Number of requested experts that were in flight into the tier.",
        "model_name",
        "tier",
        "layer",
    ),
    _counter(
        "moecast_expert_cache_misses_total",
        "Number of requested experts that were not in the tier.",
        "model_name",
        "tier",
        "layer",
    ),
    _counter(
        "moecast_expert_cache_evictions_total",
        "Number of experts evicted from the tier.",
        "model_name",
        "tier",
        "layer",
    ),
    _counter(
        "moecast_expert_bytes_total", "Bytes transferred into the tier.", "model_name", "tier"
    ),
    _counter(
        "moecast_prefetch_issued_bytes_total",
        "Bytes prefetched: transferred before a router requested the expert.",
        "model_name",
        "tier",
    ),
    _counter(
        "moecast_prefetch_used_bytes_total",
        "Prefetched bytes whose expert was requested afterwards.",
        "model_name",
        "tier",
    ),
    _counter(
        "moecast_prefetch_wasted_bytes_total",
        "Prefetched bytes whose expert was evicted before it was requested.",
        "model_name",
        "tier",
    ),
    _counter(
        "moecast_prefetch_late_bytes_total",
        "Bytes of predicted experts that were transferred after the router had requested them.",
        "model_name",
        "tier",
    ),
    _gauge("moecast_cache_bytes", "Bytes of occupied slots.", "model_name", "tier"),
    _gauge("moecast_cache_budget_bytes", "Bytes of all slots.", "model_name", "tier"),
    _gauge(
        "moecast_pinned_experts",
        "Number of experts pinned by a running or pending computation or copy.",
        "model_name",
        "tier",
    ),
    _gauge("moecast_in_flight_experts", "Number of experts in flight.", "model_name", "tier"),
    _gauge("moecast_lost_slots", "Number of slots held by hung transfers.", "model_name", "tier"),
    _counter(
        "moecast_predicted_experts_total",
        "Number of experts predicted for a layer before it was routed.",
        "model_name",
        "layer",
    ),
    _counter(
        "moecast_predicted_experts_in_time_total",
        "Number of predicted experts that were complete before the layer was routed (the "
        "numerator of FetchRate).",
        "model_name",
        "layer",
    ),
    _counter(
        "moecast_predicted_experts_needed_total",
        "Number of predicted experts that the layer's router requested.",
        "model_name",
        "layer",
    ),
    _gauge(
        "moecast_predictor_recall",
        "Share of a layer's requested experts that had been predicted, since the start; absent "
        "for layers without predictions.",
        "model_name",
        "layer",
    ),
    _counter("moecast_predictor_seconds_total", "Time spent in the predictor.", "model_name"),
    _counter(
        "moecast_stall_seconds_total",
        "Time that computation waited for transfers.",
        "model_name",
    ),
    _counter(
        "moecast_link_busy_seconds_total",
        "Time of a link's transfers, summed over its threads: disk, copy.",
        "model_name",
        "link",
    ),
    _counter(
        "moecast_io_errors_total",
        "Number of failed transfers, by kind: read, truncated, damaged, hung, died.",
        "model_name",
        "kind",
    ),
    _gauge("moecast_lost_threads", "Number of threads hung in a transfer.", "model_name"),
    _gauge(
        "moecast_prefetching",
        "1 while prefetching is on, 0 while it is off because it slowed decoding; absent for "
        "systems without adaptive prefetching.",
        "model_name",
    ),
    _gauge(
        "moecast_server_info",
        "Always 1; the labels name version, system, predictor and eviction policy.",
        "model_name",
        "version",
        "system",
        "predictor",
        "eviction",
    ),
)
"""Metrics that `runtime.serving.metrics.EngineCollector` reads from the engine."""

DEFINITIONS = {metric.name: metric for metric in (*REQUEST_METRICS, *EXPERT_METRICS)}
