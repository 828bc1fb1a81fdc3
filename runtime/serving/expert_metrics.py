"""The expert cache, the transfers and the predictor as Prometheus sees them.

Nothing is counted here: the engine's own counters are read when somebody asks.
"""

from collections.abc import Iterable, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from runtime.engine.monitor import EngineMonitor, EngineSnapshot
from runtime.errors import Fault
from runtime.serving.metric_names import EXPERTS, Kind

BY_LAYER = {
    "moecast_expert_cache_hits_total": "hits",
    "moecast_expert_cache_joins_total": "joins",
    "moecast_expert_cache_misses_total": "misses",
    "moecast_expert_cache_evictions_total": "evictions",
}
"""Counters of each tier and layer, by their name in `runtime.policy.counters.Counters`."""
BY_TIER = {
    "moecast_expert_bytes_total": "bytes_moved",
    "moecast_prefetch_issued_bytes_total": "bytes_prefetched",
    "moecast_prefetch_used_bytes_total": "bytes_used",
    "moecast_prefetch_wasted_bytes_total": "bytes_wasted",
    "moecast_prefetch_late_bytes_total": "bytes_late",
}
OF_PREDICTOR = {
    "moecast_predicted_experts_total": "predicted",
    "moecast_predicted_experts_in_time_total": "predicted_in_time",
    "moecast_predicted_experts_needed_total": "needed_predicted",
}
OF_TIERS = {
    "moecast_cache_bytes": "used_bytes",
    "moecast_cache_budget_bytes": "budget_bytes",
    "moecast_pinned_experts": "num_pinned",
    "moecast_in_flight_experts": "num_in_flight",
    "moecast_lost_slots": "num_quarantined",
}
"""Fields of `runtime.engine.monitor.TierState`."""


class ExpertMetrics(Collector):
    """Reads one engine; layers are numbered as those with routed experts, from 0."""

    def __init__(self, monitor: EngineMonitor, *, model_name: str, info: Mapping[str, str]):
        self._monitor = monitor
        self._model_name = model_name
        self._info = dict(info)

    def describe(self) -> Iterable[Metric]:
        """Names without values: registering asks for them, and needs no running engine."""
        return self._families().values()

    def collect(self) -> Iterable[Metric]:
        families = self._families()
        for name, labels, value in self._samples(self._monitor.snapshot()):
            families[name].add_metric([self._model_name, *labels], value)
        return families.values()

    def _families(self) -> dict[str, CounterMetricFamily | GaugeMetricFamily]:
        return {
            one.name: (CounterMetricFamily if one.kind is Kind.COUNTER else GaugeMetricFamily)(
                one.family, one.help, labels=one.labels
            )
            for one in EXPERTS
        }

    def _samples(self, state: EngineSnapshot) -> Iterable[tuple[str, list[str], float]]:
        """`(name, labels after the model's name, value)`."""
        for tier in state.tiers:
            total = tier.total.as_dict()
            for name, field in BY_TIER.items():
                yield name, [tier.name], total[field]
            for name, field in OF_TIERS.items():
                yield name, [tier.name], getattr(tier, field)
            for layer, counters in enumerate(tier.layers):
                for name, field in BY_LAYER.items():
                    yield name, [tier.name, str(layer)], getattr(counters, field)
        for layer, counters in enumerate(state.computing_layers):
            for name, field in OF_PREDICTOR.items():
                yield name, [str(layer)], getattr(counters, field)
            if counters.recall is not None:
                yield "moecast_predictor_recall", [str(layer)], counters.recall
        for link, seconds in state.link_seconds.items():
            yield "moecast_link_busy_seconds_total", [link], seconds
        for fault in Fault:
            yield "moecast_io_errors_total", [fault], state.faults.get(fault, 0)
        yield "moecast_predictor_seconds_total", [], state.predictor_seconds
        yield "moecast_stall_seconds_total", [], state.stall_seconds
        yield "moecast_lost_threads", [], state.num_lost_threads
        if state.prefetching is not None:
            yield "moecast_prefetching", [], float(state.prefetching)
        served = [self._info[key] for key in ("version", "system", "predictor", "eviction")]
        yield "moecast_server_info", served, 1
