"""Differences of two entries: their metrics, latency, size and accuracy by layer.

Every metric that entries have is better the larger it is.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from zoo.entry import ZooEntry
from zoo.errors import MismatchError
from zoo.manifest import is_number


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


def pair_figures(first: Mapping[Any, Any], second: Mapping[Any, Any]) -> list[MetricPair]:
    """Pairs the numbers of two tables by name, in their order."""
    pairs = []
    for name in dict.fromkeys((*first, *second)):
        values = [figures.get(name) for figures in (first, second)]
        if any(map(is_number, values)):
            pairs.append(MetricPair(str(name), *(v if is_number(v) else None for v in values)))
    return pairs


def measured_costs(entry: ZooEntry) -> Mapping[str, Any]:
    """Returns what an entry costs: size in bytes, and median microseconds of a layer's events."""
    costs: dict[str, Any] = {"bytes": entry.manifest.size}
    for batch, times in as_table(layer_figures(entry).get("latency_us")).items():
        costs[f"us a layer, batch {batch}"] = as_table(times).get("layer_p50")
    return costs


def layer_accuracies(entry: ZooEntry) -> Mapping[int, Any]:
    accuracies = layer_figures(entry).get("accuracy")
    return dict(enumerate(accuracies)) if isinstance(accuracies, list) else {}


def layer_figures(entry: ZooEntry) -> dict[str, Any]:
    """Returns what `moecast train` measured of each layer; empty for `reuse`, of all together."""
    return as_table(entry.metrics().get("layers"))


def as_table(value: object) -> dict[str, Any]:
    """Returns a table of `metrics.json`, which anyone may have written; empty if it is none."""
    return value if isinstance(value, dict) else {}


COMPARED: dict[str, Callable[[ZooEntry], Mapping[Any, Any]]] = {
    "held out": lambda entry: entry.manifest.metrics,
    "costs": measured_costs,
    "accuracy by layer": layer_accuracies,
}
"""By heading: the figures of an entry that a comparison shows."""


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
