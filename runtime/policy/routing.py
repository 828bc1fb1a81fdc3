"""Which replica a request goes to: by what its prompt's experts are forecast to be, and by load.

Shape suffixes: L layers, E experts, T tokens.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from predictors.base import Floats, Forecast

MEMORY = 0.99
"""Of the mean request, at each request."""

Mass = Floats
"""`[L, E]`: expected tokens of a request on each expert; all zeros: nothing is known."""


@dataclass(frozen=True, kw_only=True)
class Replica:
    """One replica as the router sees it."""

    name: str
    resident_LE: NDArray[np.bool_]
    """Which experts are where it computes."""
    running: int = 0
    waiting: int = 0
    max_running: int = 8
    max_waiting: int = 64
    healthy: bool = True
    """Neither failed, nor loading, nor draining."""

    @property
    def takes_more(self) -> bool:
        """Whether its bounded queue has room."""
        return self.healthy and self.running + self.waiting < self.max_running + self.max_waiting

    @property
    def load(self) -> float:
        """Of what it can run at once, how much it has been given; above 1, requests wait."""
        return (self.running + self.waiting) / self.max_running


def expected_mass(forecasts: Iterable[Forecast], *, num_layers: int, num_experts: int) -> Mass:
    """A prompt's forecast, as predictors answer it before anything is computed: for each expert,
    the expected number of the prompt's tokens; layers that are not forecast stay zero.
    """
    mass_LE = np.zeros((num_layers, num_experts), dtype=np.float32)
    for forecast in forecasts:
        mass_LE[forecast.layer] = np.maximum(mass_LE[forecast.layer], forecast.expected_tokens_E)
    return mass_LE


def overlap(mass_LE: Mass, resident_LE: NDArray[np.bool_]) -> float:
    """Share of a request's expected expert calls that find their expert, 0 where none is known."""
    total = float(mass_LE.sum())
    return float(mass_LE[resident_LE].sum()) / total if total > 0 else 0.0


class Routing(Protocol):
    """Not thread-safe."""

    name: str

    def choose(self, mass_LE: Mass, replicas: Sequence[Replica]) -> int | None:
        """The replica's index; None: every queue is full. To be asked any number of times."""

    def sent(self, mass_LE: Mass, replica: Replica) -> None:
        """The request went there."""


def open_to(replicas: Sequence[Replica]) -> list[int]:
    return [i for i, replica in enumerate(replicas) if replica.takes_more]


class RoundRobin:
    """One after another, past those that take no more."""

    name = "round-robin"

    def __init__(self) -> None:
        self._turns = 0

    def choose(self, mass_LE: Mass, replicas: Sequence[Replica]) -> int | None:  # noqa: ARG002
        order = ((self._turns + step) % len(replicas) for step in range(len(replicas)))
        return next((i for i in order if replicas[i].takes_more), None)

    def sent(self, mass_LE: Mass, replica: Replica) -> None:  # noqa: ARG002
        self._turns += 1


class LeastLoaded:
    """The one with the fewest requests; equal ones in turn."""

    name = "least-loaded"

    def __init__(self) -> None:
        self._turns = 0

    def choose(self, mass_LE: Mass, replicas: Sequence[Replica]) -> int | None:  # noqa: ARG002
        count = len(replicas)
        return min(
            open_to(replicas),
            key=lambda i: (replicas[i].load, (i - self._turns) % count),
            default=None,
        )

    def sent(self, mass_LE: Mass, replica: Replica) -> None:  # noqa: ARG002
        self._turns += 1


class CacheAware:
    """Of the replicas that are about as busy as the least busy one, where most of what the request
    is expected to need is resident.

    What replicas hold changes with every token; what was sent to them lately says what they will
    hold. Each replica's `heat` is the decayed mass of its requests, and counts beside residency.

    Args:
        slack: load above the least that is borne for the sake of what is resident.
        heat_weight: of likeness to the replica's latest requests, beside residency.
        decay: of the heat, at each request that the replica gets.
    """

    name = "cache-aware"

    def __init__(self, *, slack: float = 0.0, heat_weight: float = 3.0, decay: float = 0.9) -> None:
        self.slack, self.heat_weight, self.decay = slack, heat_weight, decay
        self._heat: dict[str, Mass] = {}
        self._fallback = LeastLoaded()
        self._mean: Mass | None = None

    def choose(self, mass_LE: Mass, replicas: Sequence[Replica]) -> int | None:
        if not mass_LE.any():
            return self._fallback.choose(mass_LE, replicas)
        candidates = open_to(replicas)
        least = min((replicas[i].load for i in candidates), default=0.0)
        near = [i for i in candidates if replicas[i].load <= least + self.slack]
        special_LE = self._special(mass_LE)
        return max(
            near,
            key=lambda i: (self._score(mass_LE, special_LE, replicas[i]), -replicas[i].load),
            default=None,
        )

    def sent(self, mass_LE: Mass, replica: Replica) -> None:
        self._fallback.sent(mass_LE, replica)
        if not mass_LE.any():
            return
        share_LE = mass_LE / mass_LE.sum()
        if self._mean is None:
            self._mean = share_LE
        self._mean = (MEMORY * self._mean + (1 - MEMORY) * share_LE).astype(np.float32)
        special_LE = self._special(mass_LE)
        heat_LE = self._heat.get(replica.name, special_LE)
        self._heat[replica.name] = self.decay * heat_LE + (1 - self.decay) * special_LE

    def _special(self, mass_LE: Mass) -> Mass:
        """What tells the request from the mean of all so far: what every request needs is resident
        everywhere, and would drown the difference.
        """
        share_LE = (mass_LE / mass_LE.sum()).astype(np.float32)
        return share_LE if self._mean is None else share_LE - self._mean

    def _score(self, mass_LE: Mass, special_LE: Mass, replica: Replica) -> float:
        return overlap(mass_LE, replica.resident_LE) + self.heat_weight * cosine(
            special_LE, self._heat.get(replica.name)
        )


def cosine(one_LE: Mass, other_LE: Mass | None) -> float:
    """0 where there is nothing to compare."""
    if other_LE is None:
        return 0.0
    norm = float(np.linalg.norm(one_LE) * np.linalg.norm(other_LE))
    return float((one_LE * other_LE).sum()) / norm if norm > 0 else 0.0


ROUTINGS = {one.name: one for one in (RoundRobin, LeastLoaded, CacheAware)}
