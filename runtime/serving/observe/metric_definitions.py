"""The table of all metrics that `/metrics` exposes: `metric_definitions.yaml`."""

from collections.abc import Iterator, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any

from predictors.records import StrictRecord
from predictors.typed_values import read_table
from runtime.engine.monitor import EngineSnapshot

Samples = Iterator[tuple[list[str], float]]
"""Values of a metric with their labels after the model's name."""


class MetricKind(StrEnum):
    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class MetricDefinition(StrictRecord):
    """One metric family."""

    kind: MetricKind
    name: str
    """Name in queries; a histogram's series append `_bucket`, `_sum` and `_count`."""
    help: str
    by: tuple[str, ...] = ()
    """Labels besides those that all metrics have."""
    path: str | None = None
    """Attributes that lead from an `EngineSnapshot` to the value; `*` is each item, and a label."""
    buckets: tuple[float, ...] = ()
    """Upper bounds of a histogram."""

    @property
    def labels(self) -> tuple[str, ...]:
        """Names of all labels; there is one `engine`, "0"."""
        common = ("model_name", "engine") if self.name.startswith("vllm:") else ("model_name",)
        return (*common, *self.by)

    @property
    def family(self) -> str:
        """The family's name, without the suffix of a counter's samples."""
        return self.name.removesuffix("_total") if self.kind is MetricKind.COUNTER else self.name

    def read(self, state: EngineSnapshot) -> Samples:
        """Read the values from an engine."""
        return find_values(state, self.path.split(".")) if self.path else iter(())


def find_values(value: Any, path: list[str]) -> Samples:
    """Yield the values at the end of a path, but for those that are None."""
    if value is None:
        return
    if not path:
        yield [], float(value)
    elif path[0] != "*":
        yield from find_values(getattr(value, path[0]), path[1:])
    else:
        items = value.items() if isinstance(value, Mapping) else enumerate(value)
        for key, item in items:
            label = str(getattr(item, "name", key))
            for labels, found in find_values(item, path[1:]):
                yield [label, *labels], found


def read_definitions(part: str) -> tuple[MetricDefinition, ...]:
    return tuple(MetricDefinition(name=name, **values) for name, values in TABLE[part].items())


TABLE = read_table(Path(__file__).with_suffix(".yaml"))
REQUEST_METRICS = read_definitions("requests")
"""Metrics that `runtime.serving.observe.metrics.ServerMetrics` fills."""
EXPERT_METRICS = read_definitions("experts")
"""Metrics that `runtime.serving.observe.metrics.EngineCollector` reads from the engine."""
DEFINITIONS = {metric.name: metric for metric in (*REQUEST_METRICS, *EXPERT_METRICS)}
SERVER_INFO = DEFINITIONS["moecast_server_info"]
