"""Differences of two entries: their metrics, latency, size and accuracy by layer.

Every metric that entries have is better the larger it is.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from zoo.entry import ZooEntry
from zoo.errors import MismatchError


@dataclass(frozen=True)
class MetricPair:
    """A figure of two entries; None: not measured."""

    name: str
    first: float | None
    second: float | None

    @property
    def difference(self) -> float | None:
        """Second less first; None unless both were measured."""
        if self.first is None or self.second is None:
            return None
        return self.second - self.first

    def has_fallen(self, tolerance: float) -> bool:
        """Whether the second is lower by more than `tolerance`, or was not measured."""
        if self.first is None:
            return False
        return self.second is None or self.first - self.second > tolerance


def is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def pair_figures(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[MetricPair]:
    """Pairs the numbers of two tables by name, in their order."""
    pairs = []
    for name in dict.fromkeys((*first, *second)):
        values = [
            value if is_number(value) else None for value in (first.get(name), second.get(name))
        ]
        if values != [None, None]:
            pairs.append(MetricPair(name, *values))
    return pairs


def pair_metrics(first: ZooEntry, second: ZooEntry) -> list[MetricPair]:
    """Pairs the held-out metrics of two entries."""
    return pair_figures(first.manifest.metrics, second.manifest.metrics)


def pair_costs(first: ZooEntry, second: ZooEntry) -> list[MetricPair]:
    """Pairs what two entries cost: size in bytes, and median microseconds of a layer's events."""
    return pair_figures(measured_costs(first), measured_costs(second))


def measured_costs(entry: ZooEntry) -> dict[str, float | None]:
    costs: dict[str, float | None] = {"bytes": entry.manifest.size}
    for batch, times in as_table(layer_figures(entry).get("latency_us")).items():
        costs[f"us a layer, batch {batch}"] = as_table(times).get("layer_p50")
    return costs


def pair_layers(first: ZooEntry, second: ZooEntry) -> list[MetricPair]:
    """Pairs the accuracies of each layer; empty if neither entry has any."""
    tables = [layer_accuracies(entry) for entry in (first, second)]
    return pair_figures(*tables)


def layer_accuracies(entry: ZooEntry) -> dict[str, Any]:
    accuracies = layer_figures(entry).get("accuracy")
    return {
        str(layer): value
        for layer, value in enumerate(accuracies if isinstance(accuracies, list) else [])
    }


def layer_figures(entry: ZooEntry) -> dict[str, Any]:
    """Returns what `moecast train` measured of each layer; empty for `reuse`, of all together."""
    return as_table(entry.metrics().get("layers"))


def as_table(value: object) -> dict[str, Any]:
    """Returns a table of `metrics.json`, which anyone may have written; empty if it is none."""
    return value if isinstance(value, dict) else {}


def require_same_model(first: ZooEntry, second: ZooEntry) -> None:
    """Raises MismatchError if the entries are not of one model: their figures say nothing then."""
    specs = first.manifest.spec, second.manifest.spec
    if not specs[0].serves(specs[1]) and not specs[1].serves(specs[0]):
        specs[0].require(
            specs[1],
            this=f"{first.manifest.name} in {first.where}",
            that=f"{second.manifest.name} in {second.where}",
            error=MismatchError,
            hint="Compare entries of one model: moecast zoo list model=NAME",
        )


def describe_traces(first: ZooEntry, second: ZooEntry) -> str | None:
    """Returns a line if the figures were measured on different traces; None if on the same."""
    digests = [entry.manifest.trace_digest or "none" for entry in (first, second)]
    if digests[0] == digests[1]:
        return None
    return (
        f"measured on the held-out requests of different traces ({digests[0][:12]} and "
        f"{digests[1][:12]}): differences may be those of the requests"
    )
