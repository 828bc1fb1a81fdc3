"""The bound: all routing of a step known when it begins, and Belady eviction.

Shape suffixes: E experts.
"""

from dataclasses import replace
from typing import Any, Protocol, TypeVar

import numpy as np

from predictors.base import Floats, Forecast, Forecasts, Ints, Predictor, Signal
from predictors.spec import ModelSpec
from runtime.config import ORACLE, SystemConfig
from runtime.sim.routing import Routing, routing
from runtime.sim.step import RecordedStep


class Timed(Protocol):
    """What two replays are compared by."""

    ttft_seconds: list[float]
    tpot_seconds: list[float]


Stats = TypeVar("Stats", bound=Timed, covariant=True)


class Run(Protocol[Stats]):
    """One replay of the steps with a predictor and a system."""

    def __call__(
        self,
        steps: list[RecordedStep],
        predictor: Predictor,
        *,
        system: SystemConfig,
        observer: Any,
    ) -> Stats: ...


class Oracle(Predictor):
    """Answers `begin_step` with what the routers of that step will choose, nearest layer first.

    And each router with the layers after it, for what was here at first may have made way since.
    """

    kind = ORACLE
    signals = frozenset({Signal.TOKENS, Signal.ROUTED})

    def __init__(self, spec: ModelSpec, future: Routing):
        super().__init__(spec)
        self._steps = iter(future)
        self._known: list[Forecast] = []
        """Of the step's layers, each its routing."""

    def begin_step(self, tokens_T: Ints, requests_T: Ints) -> Forecasts:  # noqa: ARG002
        self._known = []
        for layer, chosen in enumerate(next(self._steps)):
            scores_1E = np.zeros((1, self.spec.num_experts), dtype=np.float32)
            scores_1E[0, chosen] = 1.0
            self._known.append(Forecast(layer, scores_1E, wanted=chosen))
        return self._known

    def routed(self, layer: int, experts_TK: Ints, logits_TE: Floats | None) -> Forecasts:  # noqa: ARG002
        return self._known[layer + 1 :]


def bound(
    steps: list[RecordedStep],
    spec: ModelSpec,
    system: SystemConfig,
    *,
    run: Run[Stats],
    observer: Any = None,
) -> Stats:
    """The better of two replays of a system that knows: experts fetched whole, which pays the
    link's latency once, and chunk by chunk, where the tiers' links overlap.
    """
    future = routing(steps, spec)

    def run_with(one: SystemConfig, watcher: Any) -> Stats:
        return run(steps, Oracle(spec, future), system=one, observer=watcher)

    ways = [replace(system, chunked=chunked) for chunked in (False, True)]
    found = [run_with(one, None) for one in ways]
    best = min(range(len(ways)), key=lambda i: _seconds(found[i]))
    return found[best] if observer is None else run_with(ways[best], observer)


def _seconds(stats: Timed) -> float:
    return sum(stats.tpot_seconds) + sum(stats.ttft_seconds)
