"""What the prefetcher counts: sums only, so that runs and layers can be added up."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields


@dataclass
class Counters:
    """Bytes are those of the arena (what a slot holds), counted when a transfer ends."""

    requests: int = 0
    """Experts that routers asked for: distinct experts per layer and step."""
    hits: int = 0
    """Of these, fully in the arena when their router spoke."""
    joins: int = 0
    """Of these, partly arrived or in flight: completed, not fetched again."""
    misses: int = 0
    """Of these, not there at all."""
    predicted: int = 0
    """Predicted experts of layers that were routed: the denominator of FetchRate."""
    predicted_in_time: int = 0
    """Of these, all bytes had arrived before their layer was routed (promoe 4.1)."""
    needed_predicted: int = 0
    """Requests that had been predicted, in time or not: the numerator of the predictor's recall."""
    needed_predicted_in_time: int = 0
    """Requests that had been predicted and had arrived in time: the joint figure's numerator."""
    bytes_moved: int = 0
    bytes_prefetched: int = 0
    """Moved on a prediction, before any router asked."""
    bytes_used: int = 0
    """Of the prefetched, those whose expert was then asked for."""
    bytes_wasted: int = 0
    """Of the prefetched, those whose expert left the arena before it was asked for."""
    bytes_late: int = 0
    """Moved after the router had asked for a predicted expert: predicted, but not in time."""
    evictions: int = 0

    def as_dict(self) -> dict[str, int]:
        return asdict(self)

    def add(self, other: "Counters") -> None:
        for field in fields(self):
            setattr(self, field.name, getattr(self, field.name) + getattr(other, field.name))

    @property
    def hit_rate(self) -> float | None:
        """Share of requests that were fully there; None before the first request."""
        return self.hits / self.requests if self.requests else None

    @property
    def recall(self) -> float | None:
        """Share of needed experts that were predicted; None when nothing was predicted."""
        return self.needed_predicted / self.requests if self.predicted else None

    @property
    def fetch_rate(self) -> float | None:
        """Share of predicted experts that had arrived in time; None when nothing was predicted."""
        return self.predicted_in_time / self.predicted if self.predicted else None

    @property
    def joint_rate(self) -> float | None:
        """Share of needed experts that were predicted and had arrived in time."""
        return self.needed_predicted_in_time / self.requests if self.requests else None


def added(layers: Iterable[Counters]) -> Counters:
    """The layers' counters as one."""
    total = Counters()
    for counters in layers:
        total.add(counters)
    return total
