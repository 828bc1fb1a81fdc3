"""Discrete events over a prefetcher: its links, one compute stream, one predictor beside them."""

import heapq
import itertools
import math
from collections.abc import Callable, Sequence

from predictors.base import Floats, Forecasts, Predictor
from runtime.config import ORACLE
from runtime.policy.eviction import Expert
from runtime.policy.planner import Planner
from runtime.policy.prefetcher import Prefetcher, Task
from runtime.sim.hardware import Hardware

Observer = Callable[[str, float, float, Expert | None], None]
"""Told what happened (compute, stall, fetch, prefetch), from when to when, and to which expert;
None: all of a layer but its experts."""


class Simulator:
    """Advances the links and the predictor to the compute stream's time, whenever that moves.

    `now` is the compute stream's clock in seconds.
    """

    def __init__(
        self,
        prefetcher: Prefetcher,
        hardware: Hardware,
        *,
        predictor: Predictor | None,
        planner: Planner,
        observer: Observer | None = None,
    ):
        self.now = 0.0
        self.stall_seconds = 0.0
        self.predictor_seconds = 0.0
        """Charged to predictions, beside the computation."""
        self._observer = observer
        self._prefetcher = prefetcher
        self._hardware = hardware
        # The bound knows; it computes nothing to know it.
        free = predictor is not None and predictor.kind == ORACLE
        self._forecast_seconds = 0.0 if free else hardware.predictor_seconds
        self._planner = planner
        self._clock = 0.0
        self._transfers: list[tuple[float, Task] | None] = [None] * len(prefetcher.tiers)
        """What each tier's link is at, with the time of its end."""
        self._forecasts: list[tuple[float, int, Forecasts, int]] = []
        self._sequence = itertools.count()
        self._predictor_free = 0.0
        self._last_routed = 0.0

    # ---- the predictor, which runs beside the computation

    def forecast(self, forecasts: Forecasts, *, layer_now: int) -> None:
        """What the predictor answered to an event now; it takes effect when it has computed."""
        if not forecasts or not self._wants_forecasts:
            return
        start = max(self.now, self._predictor_free)
        self._predictor_free = start + self._forecast_seconds
        self.predictor_seconds += self._forecast_seconds
        item = (self._predictor_free, next(self._sequence), forecasts, layer_now)
        heapq.heappush(self._forecasts, item)

    @property
    def _wants_forecasts(self) -> bool:
        return self._planner.governor is None or self._planner.governor.prefetching

    # ---- the compute stream

    def compute(self, seconds: float, expert: Expert | None = None) -> None:
        """The compute stream is busy for a while, with one expert or a layer's other weights."""
        if self._observer is not None:
            self._observer("compute", self.now, self.now + seconds, expert)
        self._advance(self.now + seconds)

    def valued(self, layer: int, value_E: Floats) -> None:
        """What the layer's experts will be worth after this step."""
        self._prefetcher.valued(layer, value_E)

    def run_experts(self, layer: int, tokens_per_expert: dict[int, int]) -> None:
        """The router has spoken: brings and computes the layer's experts."""
        prefetcher = self._prefetcher
        self._discard_forecasts(layer)
        if self._planner.governor is not None and layer > 0:
            self._planner.governor.window.layer_passed(self.now - self._last_routed)
        self._last_routed = self.now
        pending = prefetcher.routed(layer, tokens_per_expert)
        while pending:
            expert = self._next_ready(layer, pending)
            pending.remove(expert)
            seconds = self._hardware.expert_seconds(tokens_per_expert[expert])
            self.compute(seconds, (layer, expert))
            prefetcher.used((layer, expert))

    def _next_ready(self, layer: int, pending: Sequence[int]) -> int:
        techniques = self._prefetcher.techniques
        free = techniques.reordered and techniques.early_preemption
        candidates = pending if free else pending[:1]
        self._prefetcher.demand((layer, pending[0]))
        if techniques.early_preemption and not techniques.reordered:
            self._prefetcher.make_room(layer, pending[0], pending)
        started = self.now
        while True:
            for e in candidates:
                if self._prefetcher.is_ready((layer, e)):
                    self.stall_seconds += self.now - started
                    if self._observer is not None and self.now > started:
                        self._observer("stall", started, self.now, (layer, e))
                    return e
            self._advance(self.now)
            under_way = [transfer[0] for transfer in self._transfers if transfer is not None]
            assert under_way, (layer, pending)
            self._advance(min(under_way))

    def _discard_forecasts(self, layer: int) -> None:
        """A forecast that is still being computed when its layer is routed comes too late."""
        kept: list[tuple[float, int, Forecasts, int]] = []
        for time, ticket, forecasts, layer_now in self._forecasts:
            later = [forecast for forecast in forecasts if forecast.layer > layer]
            if later:
                kept.append((time, ticket, later, layer_now))
        self._forecasts = kept
        heapq.heapify(self._forecasts)

    # ---- time

    def _advance(self, until: float) -> None:
        while True:
            self._start_transfers()
            arrivals = [(transfer[0], i) for i, transfer in enumerate(self._transfers) if transfer]
            arrival, link = min(arrivals, default=(math.inf, -1))
            known = self._forecasts[0][0] if self._forecasts else math.inf
            event = min(arrival, known)
            if event > until or event == math.inf:
                break
            self._clock = max(self._clock, event)
            if arrival <= known:
                self._finish_transfer(link)
            else:
                _, _, forecasts, layer_now = heapq.heappop(self._forecasts)
                self._planner.plan(forecasts, layer_now=layer_now)
        self._clock = max(self._clock, until)
        self.now = max(self.now, until)

    def _start_transfers(self) -> None:
        # From the top down: what a tier asks of the one below can start at once.
        for i, tier in enumerate(self._prefetcher.tiers):
            if self._transfers[i] is None and (task := tier.next_task()) is not None:
                end = self._clock + self._hardware.transfer_seconds(task.num_bytes, tier=i)
                self._transfers[i] = (end, task)
                if self._observer is not None and i == 0:
                    kind = "fetch" if task.high else "prefetch"
                    self._observer(kind, self._clock, end, task.expert)

    def _finish_transfer(self, link: int) -> None:
        transfer = self._transfers[link]
        assert transfer is not None
        task = transfer[1]
        self._transfers[link] = None
        self._prefetcher.tiers[link].done(task)
        if self._planner.governor is not None and link == 0:
            seconds = self._hardware.transfer_seconds(task.num_bytes)
            self._planner.governor.window.transferred(task.num_bytes, seconds)
