"""Counters of a cache: sums only, so that runs and layers can be added up."""

from collections.abc import Iterable

FIELDS = (
    "requests",
    "hits",
    "joins",
    "misses",
    "computed_below",
    "predicted",
    "needed_predicted",
    "needed_predicted_in_time",
    "needed_predicted_resident",
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
    """Predicted experts of layers that were routed, requested or not."""
    needed_predicted: int
    """Requests that had been predicted, in time or not: the numerator of the predictor's recall."""
    needed_predicted_in_time: int
    """Requests that had been predicted and were hits: fetched "before they are accessed" (ProMoE,
    section 4.1). A request is the access: by it the cache decides between hit and miss."""
    needed_predicted_resident: int
    """Those of them for which no prediction fetched anything: they were resident when they were
    predicted, and not because an earlier prediction had fetched them."""
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
        return self.needed_predicted / self.requests if self.predicted and self.requests else None

    @property
    def fetch_rate(self) -> float | None:
        """Share of predicted requests, without those resident anyway, that were in time; or None.

        ProMoE (section 4.1) counts residents as fetched, `promoe_fetch_rate`: a predictor that
        names what is there, and fetches nothing, has a rate of 1.
        """
        num_moved = self.needed_predicted - self.needed_predicted_resident
        in_time = self.needed_predicted_in_time - self.needed_predicted_resident
        return in_time / num_moved if num_moved else None

    @property
    def promoe_fetch_rate(self) -> float | None:
        """Share of predicted requests that were in time; None when none was predicted."""
        num_predicted = self.needed_predicted
        return self.needed_predicted_in_time / num_predicted if num_predicted else None

    @property
    def resident_rate(self) -> float | None:
        """Share of predicted requests that were resident anyway; None when none was predicted."""
        num_predicted = self.needed_predicted
        return self.needed_predicted_resident / num_predicted if num_predicted else None

    @property
    def promoe_good_pred(self) -> float | None:
        """Recall x `promoe_fetch_rate`: share of requests that were predicted and in time."""
        return self.needed_predicted_in_time / self.requests if self.requests else None

    def rates(self) -> dict[str, float | None]:
        """Return the rates that a run's statistics show."""
        names = ("hit_rate", "fetch_rate", "promoe_good_pred", "recall")
        return {name: getattr(self, name) for name in names}


def sum_counters(layers: Iterable[CacheCounters]) -> CacheCounters:
    total = CacheCounters()
    for counters in layers:
        total.add(counters)
    return total
