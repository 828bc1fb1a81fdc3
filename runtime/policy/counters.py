"""Counters of a cache: sums only, so that runs and layers can be added up."""

from collections.abc import Iterable

FIELDS = (
    "requests",
    "hits",
    "joins",
    "misses",
    "computed_below",
    "predicted",
    "predicted_in_time",
    "predicted_resident",
    "needed_predicted",
    "needed_predicted_in_time",
    "bytes_moved",
    "bytes_prefetched",
    "bytes_used",
    "bytes_wasted",
    "bytes_late",
    "evictions",
)
"""Names of the counters, in the order of reports."""


class CacheCounters:
    """Counters of one layer in one tier, or their sum; bytes are counted when a transfer ends."""

    requests: int
    """Experts that routers requested: distinct experts per layer and step."""
    hits: int
    """Requests whose expert was fully in the cache when its router ran."""
    joins: int
    """Requests whose expert had partly arrived or was in flight: completed, not fetched again."""
    misses: int
    """Requests whose expert was not there at all."""
    computed_below: int
    """Misses whose expert was computed in host memory and not copied."""
    predicted: int
    """Predicted experts of layers that were routed: the denominator of FetchRate."""
    predicted_in_time: int
    """Predicted experts that had fully arrived before their layer was routed (ProMoE, section
    4.1)."""
    predicted_resident: int
    """Experts in time for which no prediction fetched anything: they were resident when they were
    predicted, and not because an earlier prediction had fetched them."""
    needed_predicted: int
    """Requests that had been predicted, in time or not: the numerator of the predictor's recall."""
    needed_predicted_in_time: int
    """Requests that had been predicted and had arrived in time: the joint rate's numerator."""
    bytes_moved: int
    """Bytes transferred into the tier."""
    bytes_prefetched: int
    """Bytes transferred on a prediction, before any router requested their expert."""
    bytes_used: int
    """Prefetched bytes whose expert was then requested."""
    bytes_wasted: int
    """Prefetched bytes whose expert was evicted before it was requested."""
    bytes_late: int
    """Bytes transferred after the router had requested a predicted expert."""
    evictions: int

    __slots__ = FIELDS

    def __init__(self, **given: int) -> None:
        for name in FIELDS:
            setattr(self, name, given.pop(name, 0))
        assert not given, given

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CacheCounters) and self.as_dict() == other.as_dict()

    def __repr__(self) -> str:
        return f"CacheCounters({self.as_dict()})"

    def as_dict(self) -> dict[str, int]:
        """Returns the counters by name."""
        return {name: getattr(self, name) for name in FIELDS}

    def add(self, other: "CacheCounters") -> None:
        for name in FIELDS:
            setattr(self, name, getattr(self, name) + getattr(other, name))

    @property
    def hit_rate(self) -> float | None:
        """Share of requests that were hits; None before the first request."""
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
    def resident_rate(self) -> float | None:
        """Share of predicted experts that were resident anyway; None when nothing was predicted."""
        return self.predicted_resident / self.predicted if self.predicted else None

    @property
    def moved_fetch_rate(self) -> float | None:
        """FetchRate of the predicted experts that were not resident anyway; None without one."""
        num_moved = self.predicted - self.predicted_resident
        in_time = self.predicted_in_time - self.predicted_resident
        return in_time / num_moved if num_moved else None

    @property
    def joint_rate(self) -> float | None:
        """Share of needed experts that were predicted and had arrived in time."""
        return self.needed_predicted_in_time / self.requests if self.requests else None

    def rates(self) -> dict[str, float | None]:
        """Return the rates that a run's statistics show."""
        names = ("hit_rate", "fetch_rate", "joint_rate", "recall")
        return {name: getattr(self, name) for name in names}


def sum_counters(layers: Iterable[CacheCounters]) -> CacheCounters:
    total = CacheCounters()
    for counters in layers:
        total.add(counters)
    return total
