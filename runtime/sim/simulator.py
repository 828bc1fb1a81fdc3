"""Discrete-event simulation of one device: its cache, links, compute stream and predictor."""

import heapq
import itertools
import math
from collections.abc import Callable, Sequence

from predictors.base import Floats, Forecasts
from runtime.policy.device_cache import DeviceCache
from runtime.policy.eviction.protocol import Expert
from runtime.policy.forecast_scheduler import ForecastScheduler
from runtime.policy.tier import TransferTask
from runtime.sim.hardware import Hardware
from runtime.sim.transfers import LinkTransfers

Observer = Callable[[str, float, float, Expert | None], None]
"""Called with what happened (compute, stall, fetch, prefetch), its start, its end and the expert;
None: all of a layer but its experts."""


class Simulator:
    """Advances the links and the predictor with the clock of the compute stream."""

    def __init__(
        self,
        cache: DeviceCache,
        hardware: Hardware,
        *,
        scheduler: ForecastScheduler,
        observer: Observer | None = None,
    ):
        self.now = 0.0
        """Clock of the compute stream, in seconds."""
        self.stall_seconds = 0.0
        self.predictor_seconds = 0.0
        """Time of predictions."""
        self._observer = observer
        self._cache = cache
        self._hardware = hardware
        self._overheads = hardware.overheads
        self._scheduler = scheduler
        self._tiers = cache.tiers
        self._links = [
            LinkTransfers(
                speed_together=self._overheads.transfer_speed_together,
                speed_computing=self._overheads.transfer_speed_computing,
            )
            for _ in self._tiers
        ]
        """Transfers of each tier's link."""
        self._seconds_of: list[dict[int, float]] = [{} for _ in self._tiers]
        """Seconds of a transfer by its bytes, of each tier."""
        self._expert_seconds_of: dict[int, float] = {}
        """Seconds of an expert by its tokens."""
        self._forecasts: list[tuple[float, int, Forecasts, int]] = []
        self._sequence = itertools.count()
        self._predictor_free = 0.0

    def begin_step(self) -> None:
        """Starts a forward pass and computes what is outside of its layers."""
        if self._overheads.step_seconds:
            self.compute(self._overheads.step_seconds)

    # ---- the predictor

    def forecast(self, forecasts: Forecasts, *, layer_now: int) -> None:
        """Schedules the predictor's answer to an event for the time when it has been computed."""
        if not forecasts or not self._scheduler.prefetching:
            return
        seconds = self._hardware.predictor_seconds
        self.predictor_seconds += seconds
        if self._overheads.predictor_inline:
            self.compute(seconds)
            self._scheduler.schedule(forecasts, layer_now=layer_now)
            self._start_transfers()  # the transfer thread starts before the router runs
            return
        self._predictor_free = max(self.now, self._predictor_free) + seconds
        item = (self._predictor_free, next(self._sequence), forecasts, layer_now)
        heapq.heappush(self._forecasts, item)

    def _discard_forecasts(self, layer: int) -> None:
        """Discards forecasts that are still being computed when their layer is routed."""
        kept: list[tuple[float, int, Forecasts, int]] = []
        for time, ticket, forecasts, layer_now in self._forecasts:
            later = [forecast for forecast in forecasts if forecast.layer > layer]
            if later:
                kept.append((time, ticket, later, layer_now))
        self._forecasts = kept
        heapq.heapify(self._forecasts)

    # ---- the compute stream

    def compute(self, seconds: float, expert: Expert | None = None) -> None:
        """Computes for a while: one expert, or a layer's other weights."""
        started, left = self.now, seconds
        bottom, speed = self._links[-1], 1.0
        bottom.set_computing(started, True)
        while True:
            self._start_transfers()
            if bottom.is_worker_busy:
                speed = self._overheads.compute_speed_transferring
            end = self.now + left / speed
            event = self._next_event_time()
            if event > end:
                break
            left = max(0.0, left - (event - self.now) * speed)
            self._handle(event)
            speed = 1.0
        self.now = end
        if self._observer is not None:
            self._observer("compute", started, end, expert)

    def on_reuse_scores(self, layer: int, score_E: Floats) -> None:
        self._cache.on_reuse_scores(layer, score_E)

    def run_experts(
        self, layer: int, tokens_per_expert: dict[int, int], *, computed_after: float = 0.0
    ) -> None:
        """Requests, waits for and computes the experts that the layer's router has chosen.

        `computed_after`: seconds until the tokens arrive from other devices.
        """
        cache = self._cache
        if self._forecasts:
            self._discard_forecasts(layer)
        pending = cache.request_routed(layer, tokens_per_expert)
        if computed_after:
            self.compute(computed_after)
        while pending:
            expert = self._next_ready(layer, pending)
            pending.remove(expert)
            self.compute(self._expert_seconds(tokens_per_expert[expert]), (layer, expert))
            cache.release((layer, expert))

    def _expert_seconds(self, num_tokens: int) -> float:
        known = self._expert_seconds_of.get(num_tokens)
        if known is None:
            known = self._expert_seconds_of[num_tokens] = self._hardware.expert_seconds(num_tokens)
        return known

    def _next_ready(self, layer: int, pending: Sequence[int]) -> int:
        techniques, is_ready = self._cache.techniques, self._cache.is_ready
        candidates = pending
        if not techniques.early_preemption:
            candidates = pending[:1]
            self._cache.request((layer, pending[0]))
        elif not techniques.reordered:
            candidates = pending[:1]
            self._cache.make_room(layer, pending[0], pending)
        for e in candidates:
            if is_ready((layer, e)):
                return e
        started = self.now
        while True:
            if self._wait():
                for e in candidates:
                    if is_ready((layer, e)):
                        self.stall_seconds += self.now - started
                        if self._observer is not None and self.now > started:
                            self._observer("stall", started, self.now, (layer, e))
                        return e

    def _wait(self) -> bool:
        """Waits for the next event; returns whether a transfer has ended.

        A computation that reads by itself does one requested transfer, if there is one.
        """
        bottom = self._links[-1]
        bottom.set_computing(self.now, False)
        if self._overheads.computation_reads and bottom.num < 2:
            task = self._tiers[-1].next_task(high_only=True)
            if task is not None:
                self._start(len(self._tiers) - 1, task, by_worker=False)
                while task in bottom:
                    self._start_transfers()
                    self._handle(self._next_event_time())
                return True
        self._start_transfers()
        event = self._next_event_time()
        assert event < math.inf, "the computation waits and nothing is under way"
        return self._handle(event)

    # ---- time

    def _next_event_time(self) -> float:
        event = self._forecasts[0][0] if self._forecasts else math.inf
        for link in self._links:
            if link.first_end < event:
                event = link.first_end
        return event

    def _handle(self, event: float) -> bool:
        """Moves the clock to the event and handles it; returns whether a transfer has ended."""
        self.now = max(self.now, event)
        for i, link in enumerate(self._links):
            if link.first_end <= event:
                self._finish(i, link.finish_first())
                return True
        _, _, forecasts, layer_now = heapq.heappop(self._forecasts)
        self._scheduler.schedule(forecasts, layer_now=layer_now)
        return False

    def _start_transfers(self) -> None:
        # From the top down: what a tier requests of the one below can start at once.
        for i, tier in enumerate(self._tiers):
            if not self._links[i].is_worker_busy and tier.may_start:
                task = tier.next_task()
                if task is not None:
                    self._start(i, task, by_worker=True)

    def _start(self, i: int, task: TransferTask, *, by_worker: bool) -> None:
        seconds = self._transfer_seconds(i, task.num_bytes) + self._overheads.task_seconds
        self._links[i].start(task, self.now, seconds, by_worker=by_worker)

    def _transfer_seconds(self, i: int, num_bytes: int) -> float:
        known = self._seconds_of[i].get(num_bytes)
        if known is None:
            known = self._hardware.transfer_seconds(num_bytes, tier=i)
            self._seconds_of[i][num_bytes] = known
        return known

    def _finish(self, i: int, ended: tuple[TransferTask, float]) -> None:
        task, started = ended
        self._tiers[i].complete(task)
        if i:
            return
        if self._observer is not None:
            kind = "fetch" if task.high else "prefetch"
            self._observer(kind, started, self.now, task.expert)
