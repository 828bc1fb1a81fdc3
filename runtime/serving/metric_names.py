"""Every metric of `/metrics`, by name: what is exposed is built from this table, and no other.

Names that begin with `vllm:` are vLLM's own, with its labels, units and buckets (vllm/v1/metrics/
loggers.py of vLLM's repository), so that dashboards made for it show this server. Ours begin with
`moecast_`: Prometheus keeps colons for recording rules.
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
"""vLLM ends them at the model's context, which is not known yet when the server starts."""

MODEL = ("model_name", "engine")
"""vLLM's labels on all that it counts; there is one engine, "0"."""


class Kind(StrEnum):
    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True)
class Metric:
    """One family of `/metrics`."""

    name: str
    """As a query names it; a histogram's series add `_bucket`, `_sum` and `_count`."""
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()
    """A histogram's upper bounds."""

    @property
    def family(self) -> str:
        """The name without the ending that a counter's samples have."""
        return self.name.removesuffix("_total") if self.kind is Kind.COUNTER else self.name


def _counter(name: str, help_text: str, *labels: str) -> Metric:
    return Metric(name, Kind.COUNTER, help_text, labels)


def _gauge(name: str, help_text: str, *labels: str) -> Metric:
    return Metric(name, Kind.GAUGE, help_text, labels)


def _histogram(name: str, help_text: str, buckets: tuple[float, ...] = LENGTH_BUCKETS) -> Metric:
    return Metric(name, Kind.HISTOGRAM, help_text, MODEL, buckets)


REQUESTS = (
    _gauge("vllm:num_requests_running", "Sequences that are being generated.", *MODEL),
    _gauge("vllm:num_requests_waiting", "Sequences that wait for their turn.", *MODEL),
    _gauge(
        "vllm:kv_cache_usage_perc",
        "Tokens in the key-value caches of running sequences, as a share (0 to 1) of the most that "
        "may run: max_running sequences of the model's whole context.",
        *MODEL,
    ),
    _counter("vllm:prompt_tokens_total", "Prompt tokens processed.", *MODEL),
    _counter("vllm:generation_tokens_total", "Tokens generated.", *MODEL),
    _counter(
        "vllm:request_success_total",
        "Sequences that ended, by reason: stop, length, abort (the client left or was cancelled), "
        "error.",
        *MODEL,
        "finished_reason",
    ),
    _histogram("vllm:request_prompt_tokens", "Prompt tokens of ended sequences."),
    _histogram("vllm:request_generation_tokens", "Generated tokens of ended sequences."),
    _histogram(
        "vllm:request_max_num_generation_tokens", "The same: each sequence is counted by itself."
    ),
    _histogram("vllm:request_params_max_tokens", "Tokens asked for at most by each sequence."),
    _histogram(
        "vllm:iteration_tokens_total", "Tokens of all sequences in one forward pass.", STEP_BUCKETS
    ),
    _histogram(
        "vllm:time_to_first_token_seconds", "From arrival to the first token.", TTFT_BUCKETS
    ),
    _histogram(
        "vllm:inter_token_latency_seconds", "Between two tokens of a sequence.", TOKEN_BUCKETS
    ),
    _histogram(
        "vllm:request_time_per_output_token_seconds",
        "A sequence's mean time for each token after the first.",
        TOKEN_BUCKETS,
    ),
    _histogram("vllm:e2e_request_latency_seconds", "From arrival to the end.", REQUEST_BUCKETS),
    _histogram("vllm:request_queue_time_seconds", "Waiting for its turn.", REQUEST_BUCKETS),
    _histogram("vllm:request_inference_time_seconds", "From its turn to its end.", REQUEST_BUCKETS),
    _histogram(
        "vllm:request_prefill_time_seconds", "From its turn to its first token.", REQUEST_BUCKETS
    ),
    _histogram(
        "vllm:request_decode_time_seconds", "From its first token to its last.", REQUEST_BUCKETS
    ),
    _counter(
        "moecast_requests_rejected_total",
        "Requests that were never queued, by the status that they were answered with.",
        "model_name",
        "status",
    ),
    Metric(
        "moecast_step_seconds",
        Kind.HISTOGRAM,
        "One forward pass of all sequences that run, with what sampling takes.",
        ("model_name",),
        TOKEN_BUCKETS,
    ),
    _gauge(
        "moecast_group_size", "Sequences that made the last forward pass together.", "model_name"
    ),
)
"""What `runtime.serving.metrics.RequestMetrics` is told."""

EXPERTS = (
    _counter(
        "moecast_expert_cache_hits_total",
        "Experts that were asked for and had fully arrived in the tier.",
        "model_name",
        "tier",
        "layer",
    ),
    _counter(
        "moecast_expert_cache_joins_total",
        "Experts that were asked for while they were on their way into the tier.",
        "model_name",
        "tier",
        "layer",
    ),
    _counter(
        "moecast_expert_cache_misses_total",
        "Experts that were asked for and were not in the tier at all.",
        "model_name",
        "tier",
        "layer",
    ),
    _counter(
        "moecast_expert_cache_evictions_total",
        "Experts that left the tier.",
        "model_name",
        "tier",
        "layer",
    ),
    _counter("moecast_expert_bytes_total", "Bytes brought into the tier.", "model_name", "tier"),
    _counter(
        "moecast_prefetch_issued_bytes_total",
        "Of these, brought on a forecast, before any router asked.",
        "model_name",
        "tier",
    ),
    _counter(
        "moecast_prefetch_used_bytes_total",
        "Of the issued, those whose expert was then asked for.",
        "model_name",
        "tier",
    ),
    _counter(
        "moecast_prefetch_wasted_bytes_total",
        "Of the issued, those whose expert left before it was asked for.",
        "model_name",
        "tier",
    ),
    _counter(
        "moecast_prefetch_late_bytes_total",
        "Brought after a router had asked for a forecast expert: forecast, but not in time.",
        "model_name",
        "tier",
    ),
    _gauge("moecast_cache_bytes", "Bytes of the slots that experts have.", "model_name", "tier"),
    _gauge("moecast_cache_budget_bytes", "Bytes of all slots.", "model_name", "tier"),
    _gauge(
        "moecast_pinned_experts",
        "Experts that are being computed or copied, or are about to be.",
        "model_name",
        "tier",
    ),
    _gauge("moecast_in_flight_experts", "Experts on their way.", "model_name", "tier"),
    _gauge("moecast_lost_slots", "Slots that hung reads hold.", "model_name", "tier"),
    _counter(
        "moecast_predicted_experts_total",
        "Experts that were forecast for a layer before it was routed.",
        "model_name",
        "layer",
    ),
    _counter(
        "moecast_predicted_experts_in_time_total",
        "Of these, fully arrived before the layer was routed (the numerator of FetchRate).",
        "model_name",
        "layer",
    ),
    _counter(
        "moecast_predicted_experts_needed_total",
        "Of these, asked for by the layer's router.",
        "model_name",
        "layer",
    ),
    _gauge(
        "moecast_predictor_recall",
        "Share of the experts that a layer's router asked for that had been forecast, since the "
        "start; absent for layers that nothing was forecast for.",
        "model_name",
        "layer",
    ),
    _counter("moecast_predictor_seconds_total", "Spent in the predictor.", "model_name"),
    _counter("moecast_stall_seconds_total", "Computation waiting for bytes.", "model_name"),
    _counter(
        "moecast_link_busy_seconds_total",
        "Transfers of a link, added up over its threads: disk, copy.",
        "model_name",
        "link",
    ),
    _counter(
        "moecast_io_errors_total",
        "Transfers that failed: read, truncated, damaged, hung, died.",
        "model_name",
        "kind",
    ),
    _gauge("moecast_lost_threads", "Threads that hang in a transfer.", "model_name"),
    _gauge(
        "moecast_prefetching",
        "1 while forecasts are fetched, 0 while that was measured not to pay; absent for systems "
        "that do not switch.",
        "model_name",
    ),
    _gauge(
        "moecast_server_info",
        "1; what is served: version, system, predictor, eviction.",
        "model_name",
        "version",
        "system",
        "predictor",
        "eviction",
    ),
)
"""What `runtime.serving.expert_metrics` reads from the engine."""

METRICS = {metric.name: metric for metric in (*REQUESTS, *EXPERTS)}
