"""Discrete-event simulation of one device: its cache, links, compute stream and predictor."""

import functools
import heapq
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from predictors.base import Floats, Forecasts
from runtime.policy.device_cache import DeviceCache
from runtime.policy.eviction.protocol import Expert
from runtime.policy.forecast_scheduler import ForecastScheduler
from runtime.policy.tier import TransferTask
from runtime.sim.hardware import Hardware

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
        self._transfer_seconds = functools.cache(hardware.transfer_seconds)
        self._expert_seconds = functools.cache(hardware.expert_seconds)
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

    def _next_ready(self, layer: int, pending: Sequence[int]) -> int:
        system, is_ready = self._cache.system, self._cache.is_ready
        candidates = pending
        if not system.early_preemption:
            candidates = pending[:1]
            self._cache.request((layer, pending[0]))
        elif not system.reordered:
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
        seconds = self._transfer_seconds(task.num_bytes, tier=i) + self._overheads.task_seconds
        self._links[i].start(task, self.now, seconds, by_worker=by_worker)

    def _finish(self, i: int, ended: tuple[TransferTask, float]) -> None:
        task, started = ended
        self._tiers[i].complete(task)
        if i:
            return
        if self._observer is not None:
            kind = "fetch" if task.high else "prefetch"
            self._observer(kind, started, self.now, task.expert)


@dataclass(slots=True, eq=False)
class _RunningTransfer:
    """A transfer and when it ends."""

    end: float
    """Time of its end at its present speed."""
    task: TransferTask
    started: float
    by_worker: bool
    """Done by the link's thread, not by the computation."""


class LinkTransfers:
    """At most two transfers at a time.

    Args:
        speed_together: Speed of each of two simultaneous transfers, against one alone.
        speed_computing: Speed of a transfer while the computation computes.
    """

    def __init__(self, *, speed_together: float = 1.0, speed_computing: float = 1.0):
        self._together = speed_together
        self._computing = speed_computing
        self._is_computing = False
        self._running: list[_RunningTransfer] = []
        self.first_end = math.inf
        """Time when the first transfer ends, if nothing else happens."""
        self.is_worker_busy = False
        """Whether the link's thread runs a transfer."""

    @property
    def num(self) -> int:
        return len(self._running)

    def __contains__(self, task: TransferTask) -> bool:
        return any(running.task is task for running in self._running)

    def set_computing(self, now: float, is_computing: bool) -> None:
        """Sets whether the computation computes from now on."""
        if is_computing == self._is_computing:
            return
        self._is_computing = is_computing
        if self._running and self._computing != 1.0:
            self._stretch(now, 1 / self._computing if is_computing else self._computing)

    def start(self, task: TransferTask, now: float, seconds: float, *, by_worker: bool) -> None:
        """Starts a transfer that takes `seconds` when nothing else runs."""
        if by_worker:
            self.is_worker_busy = True
        if self._is_computing:
            seconds /= self._computing
        if self._running:
            self._stretch(now, 1 / self._together)
            seconds /= self._together
        self._running.append(_RunningTransfer(now + seconds, task, now, by_worker))
        self.first_end = min(self.first_end, now + seconds)

    def finish_first(self) -> tuple[TransferTask, float]:
        """Removes the transfer that ends first; returns its task and when it started."""
        first = min(self._running, key=lambda running: running.end)
        self._running.remove(first)
        if first.by_worker:
            self.is_worker_busy = False
        self._stretch(first.end, self._together)
        return first.task, first.started

    def _stretch(self, now: float, factor: float) -> None:
        """Multiplies the remaining time of each transfer by `factor`."""
        self.first_end = math.inf
        for running in self._running:
            if factor != 1.0:
                running.end = now + (running.end - now) * factor
            self.first_end = min(self.first_end, running.end)
