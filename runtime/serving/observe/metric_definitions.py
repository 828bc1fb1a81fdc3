"""The table of all metrics that `/metrics` exposes.

Names that begin with `vllm:` are vLLM's, with its labels, units and buckets (vllm/v1/metrics/
loggers.py in vLLM's repository), so that vLLM's dashboards work with this server. Other names begin
with `moecast_`: Prometheus reserves colons for recording rules.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from operator import attrgetter
from typing import Any

from runtime.engine.monitor import EngineSnapshot
from runtime.errors import Fault

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

VLLM = ("model_name", "engine")
"""Labels of all vLLM metrics; there is one engine, "0"."""
SERVER = ("model_name",)
TIER = ("model_name", "tier")
LAYER = ("model_name", "layer")
TIER_LAYER = ("model_name", "tier", "layer")

Samples = Iterable[tuple[list[str], float]]
"""Values of a metric with their labels after the model's name."""


class MetricKind(StrEnum):
    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True)
class MetricDefinition:
    """One metric family."""

    kind: MetricKind
    name: str
    """Name in queries; a histogram's series append `_bucket`, `_sum` and `_count`."""
    labels: tuple[str, ...]
    help: str
    read: Callable[[EngineSnapshot], Samples] = lambda _: ()
    """Reads the values from an engine."""
    buckets: tuple[float, ...] = ()
    """Upper bounds of a histogram."""

    @property
    def family(self) -> str:
        """The family's name, without the suffix of a counter's samples."""
        return self.name.removesuffix("_total") if self.kind is MetricKind.COUNTER else self.name


counter = partial(MetricDefinition, MetricKind.COUNTER)
gauge = partial(MetricDefinition, MetricKind.GAUGE)


def histogram(
    name: str, labels: tuple[str, ...], help_text: str, buckets: tuple[float, ...]
) -> MetricDefinition:
    return MetricDefinition(MetricKind.HISTOGRAM, name, labels, help_text, buckets=buckets)


def of_engine(get: Callable[[EngineSnapshot], Any]) -> Callable[[EngineSnapshot], Samples]:
    """Reads one value; none if it is None."""
    return lambda state: [([], float(value))] if (value := get(state)) is not None else []


def of_tiers(field: str) -> Callable[[EngineSnapshot], Samples]:
    """Reads a field of each `TierState`."""
    return lambda state: [([tier.name], attrgetter(field)(tier)) for tier in state.tiers]


def of_tiers_layers(field: str) -> Callable[[EngineSnapshot], Samples]:
    """Reads a field of the counters of each layer of each tier."""
    return lambda state: [
        ([tier.name, str(layer)], getattr(counters, field))
        for tier in state.tiers
        for layer, counters in enumerate(tier.layers)
    ]


def of_layers(get: Callable[[EngineSnapshot], Iterable[Any]]) -> Callable[..., Samples]:
    """Reads a value for each layer with routed experts, from 0; none for a layer with None."""
    return lambda state: [
        ([str(layer)], value) for layer, value in enumerate(get(state)) if value is not None
    ]


def of_counters(field: str) -> Callable[[EngineSnapshot], Samples]:
    """Reads a field of each layer's counters, of the tiers that compute together."""
    return of_layers(lambda state: map(attrgetter(field), state.computing_layers))


def of_drift(field: str) -> Callable[[EngineSnapshot], Samples]:
    """Reads the accuracies of each layer of a predictor with a card."""
    return of_layers(
        lambda state: getattr(state.predictor_drift, field) if state.predictor_drift else ()
    )


REQUEST_METRICS = (
    gauge("vllm:num_requests_running", VLLM, "Running sequences."),
    gauge("vllm:num_requests_waiting", VLLM, "Waiting sequences."),
    gauge("vllm:kv_cache_usage_perc", VLLM,
          "KV-cache usage, 0 to 1: bytes of running sequences divided by kv_budget; without a "
          "kv_budget, their tokens divided by max_running times the model's context length."),
    counter("vllm:prompt_tokens_total", VLLM, "Prompt tokens processed, reused ones too."),
    counter("vllm:prefix_cache_queries_total", VLLM, "Prompt tokens that were looked up."),
    counter("vllm:prefix_cache_hits_total", VLLM, "Prompt tokens that were reused."),
    gauge("moecast_kept_kv_bytes", SERVER, "Memory of the KV caches of ended answers."),
    counter("vllm:generation_tokens_total", VLLM, "Tokens generated."),
    counter("vllm:request_success_total", (*VLLM, "finished_reason"),
            "Sequences that ended, by reason: stop, length, abort (disconnected or "
            "cancelled), error."),
    histogram("vllm:request_prompt_tokens", VLLM,
              "Prompt tokens per sequence.", LENGTH_BUCKETS),
    histogram("vllm:request_generation_tokens", VLLM,
              "Generated tokens per sequence.", LENGTH_BUCKETS),
    histogram("vllm:request_max_num_generation_tokens", VLLM,
              "Same as vllm:request_generation_tokens.", LENGTH_BUCKETS),
    histogram("vllm:request_params_max_tokens", VLLM,
              "max_tokens of each sequence.", LENGTH_BUCKETS),
    histogram("vllm:iteration_tokens_total", VLLM,
              "Tokens per forward pass.", STEP_BUCKETS),
    histogram("vllm:time_to_first_token_seconds", VLLM,
              "Time to first token (TTFT): from arrival to the first token.", TTFT_BUCKETS),
    histogram("vllm:inter_token_latency_seconds", VLLM,
              "Time between two consecutive tokens of a sequence.", TOKEN_BUCKETS),
    histogram("vllm:request_time_per_output_token_seconds", VLLM,
              "Time per output token (TPOT): mean over a sequence's tokens after the "
              "first.", TOKEN_BUCKETS),
    histogram("vllm:e2e_request_latency_seconds", VLLM,
              "Time from arrival to the end.", REQUEST_BUCKETS),
    histogram("vllm:request_queue_time_seconds", VLLM, "Time in the queue.", REQUEST_BUCKETS),
    histogram("vllm:request_inference_time_seconds", VLLM,
              "Time from start to end.", REQUEST_BUCKETS),
    histogram("vllm:request_prefill_time_seconds", VLLM,
              "Time from start to the first token.", REQUEST_BUCKETS),
    histogram("vllm:request_decode_time_seconds", VLLM,
              "Time from the first to the last token.", REQUEST_BUCKETS),
    counter("moecast_requests_rejected_total", (*SERVER, "status"),
            "Requests rejected before they were queued, by HTTP status."),
    histogram("moecast_step_seconds", SERVER,
              "Time of one forward pass of all running sequences, and of sampling.", TOKEN_BUCKETS),
    gauge("moecast_group_size", SERVER, "Sequences in the last forward pass."),
    gauge("moecast_dropped_log_lines", SERVER,
          "Lines of the log that were dropped because nobody read them in time."),
)  # fmt: skip
"""Metrics that `runtime.serving.observe.metrics.ServerMetrics` fills."""

SERVER_INFO = gauge(
    "moecast_server_info",
    (*SERVER, "version", "system", "predictor", "eviction"),
    "Always 1; the labels name version, system, predictor and eviction policy.",
)
EXPERT_METRICS = (
    counter("moecast_expert_cache_hits_total", TIER_LAYER,
            "Requested experts that were complete in the tier.", of_tiers_layers("hits")),
    counter("moecast_expert_cache_joins_total", TIER_LAYER,
            "Requested experts that were in flight into the tier.", of_tiers_layers("joins")),
    counter("moecast_expert_cache_misses_total", TIER_LAYER,
            "Requested experts that were not in the tier.", of_tiers_layers("misses")),
    counter("moecast_expert_cache_evictions_total", TIER_LAYER,
            "Experts evicted from the tier.", of_tiers_layers("evictions")),
    counter("moecast_expert_bytes_total", TIER, "Bytes transferred into the tier.",
            of_tiers("total.bytes_moved")),
    counter("moecast_prefetch_issued_bytes_total", TIER,
            "Bytes transferred before a router requested the expert.",
            of_tiers("total.bytes_prefetched")),
    counter("moecast_prefetch_used_bytes_total", TIER,
            "Prefetched bytes whose expert was requested afterwards.",
            of_tiers("total.bytes_used")),
    counter("moecast_prefetch_wasted_bytes_total", TIER,
            "Prefetched bytes whose expert was evicted before it was requested.",
            of_tiers("total.bytes_wasted")),
    counter("moecast_prefetch_late_bytes_total", TIER,
            "Bytes of predicted experts that were transferred after the router had requested "
            "them.", of_tiers("total.bytes_late")),
    gauge("moecast_cache_bytes", TIER, "Bytes of occupied slots.", of_tiers("used_bytes")),
    gauge("moecast_cache_budget_bytes", TIER, "Bytes of all slots.", of_tiers("budget_bytes")),
    gauge("moecast_pinned_experts", TIER,
          "Experts pinned by a computation or copy.", of_tiers("num_pinned")),
    gauge("moecast_in_flight_experts", TIER, "Experts in flight.", of_tiers("num_in_flight")),
    gauge("moecast_lost_slots", TIER, "Slots held by hung transfers.", of_tiers("num_quarantined")),
    counter("moecast_predicted_experts_total", LAYER,
            "Experts predicted for a layer before it was routed.", of_counters("predicted")),
    counter("moecast_predicted_experts_in_time_total", LAYER,
            "Predicted experts that were complete when the layer's router requested them.",
            of_counters("needed_predicted_in_time")),
    counter("moecast_predicted_experts_resident_total", LAYER,
            "Those of them that were resident when they were predicted: FetchRate leaves them out.",
            of_counters("needed_predicted_resident")),
    counter("moecast_predicted_experts_needed_total", LAYER,
            "Predicted experts that the layer's router requested.",
            of_counters("needed_predicted")),
    gauge("moecast_predictor_recall", LAYER,
          "Share of a layer's requested experts that had been predicted, since the start.",
          of_counters("recall")),
    gauge("moecast_predictor_accuracy", LAYER,
          "Accuracy of the layer's forecasts over the last 500 sampled tokens of decode steps; "
          "absent for predictors without a card.", of_drift("accuracy")),
    gauge("moecast_predictor_card_accuracy", LAYER,
          "Accuracy on the card of the predictor's entry, forecast as many layers ahead as here.",
          of_drift("card_accuracy")),
    gauge("moecast_predictor_drifted", SERVER,
          "1 from a mean accuracy 0.05 lower than the card's until it is 0.025 lower, else 0; "
          "absent for predictors without a card.",
          of_engine(lambda state: state.predictor_drift and state.predictor_drift.has_drifted)),
    counter("moecast_predictor_seconds_total", SERVER, "Time spent in the predictor.",
            of_engine(attrgetter("predictor_seconds"))),
    gauge("moecast_failed_predictors", SERVER,
          "Predictors that were turned off because they failed or took too long.",
          of_engine(lambda state: len(state.predictor_failures))),
    counter("moecast_stall_seconds_total", SERVER, "Time that computation waited for transfers.",
            of_engine(attrgetter("stall_seconds"))),
    counter("moecast_link_busy_seconds_total", (*SERVER, "link"),
            "Time of a link's transfers, summed over its threads: disk, copy.",
            lambda state: [([link], seconds) for link, seconds in state.link_seconds.items()]),
    counter("moecast_io_errors_total", (*SERVER, "kind"),
            "Failed transfers, by kind: read, truncated, damaged, hung, died.",
            lambda state: [([fault], state.faults.get(fault, 0)) for fault in Fault]),
    gauge("moecast_lost_threads", SERVER, "Threads hung in a transfer.",
          of_engine(attrgetter("num_lost_threads"))),
    gauge("moecast_prefetching", SERVER,
          "1 while prefetching is on, 0 while it is off because it slowed decoding.",
          of_engine(attrgetter("prefetching"))),
    SERVER_INFO,
)  # fmt: skip
"""Metrics that `runtime.serving.observe.metrics.EngineCollector` reads from the engine."""

DEFINITIONS = {metric.name: metric for metric in (*REQUEST_METRICS, *EXPERT_METRICS)}
