"""Discrete-event simulation of one device: the live transfer loop over simulated rings."""

import math
from collections import Counter, deque
from collections.abc import Sequence
from functools import partial

from predictors.base import Forecasts
from runtime.policy.device_cache import DeviceCache
from runtime.policy.eviction.protocol import Expert
from runtime.policy.forecast_scheduler import ForecastScheduler
from runtime.policy.host_split import choose_host_experts
from runtime.sim.hardware import Hardware, RooflineHardware
from runtime.sim.machine import (
    SimulatedClock,
    SimulatedLoop,
    SimulatedPredictor,
    SimulatedRing,
)
from runtime.transfer.loop import TierLink
from runtime.transfer.timeline import TimelineSink

NOTHING_ON_HOST: tuple[frozenset[int], float] = (frozenset(), 0.0)
"""The experts that the host's processor computes, and the time that it takes."""


class Simulator:
    """Runs the transfer loop with the clock of the compute stream."""

    def __init__(
        self,
        cache: DeviceCache,
        hardware: Hardware,
        *,
        scheduler: ForecastScheduler,
        timeline: TimelineSink | None = None,
        is_stateless: bool = False,
        hybrid: RooflineHardware | None = None,
    ):
        """Makes a simulator at time 0.

        Args:
            cache: Cache of the device, whose transfers are simulated.
            hardware: Times of the machine.
            scheduler: Gets the forecasts.
            timeline: Gets the spans of transfers, stalls and computed experts.
            is_stateless: The predictor may leave out an event whose forecasts would be late.
            hybrid: The hardware, if it may compute missed experts in host memory.
        """
        overheads = hardware.overheads
        self._cache = cache
        self._hardware = hardware
        self._hybrid = hybrid
        self._scheduler = scheduler
        self._step_seconds = overheads.step_seconds
        self._compute_speed_transferring = overheads.compute_speed_transferring
        self._is_synchronous = overheads.predictor_inline or cache.system.synchronous
        self._clock = SimulatedClock()
        self._predictor = SimulatedPredictor(self._clock, scheduler, is_stateless=is_stateless)
        rings = [
            SimulatedRing(
                self._clock,
                partial(hardware.transfer_seconds, tier=i),
                task_seconds=overheads.task_seconds,
                num_readers=overheads.num_readers if tier.below is None else 1,
                speed_together=overheads.transfer_speed_together,
                speed_computing=overheads.transfer_speed_computing,
            )
            for i, tier in enumerate(cache.tiers)
        ]
        self._top, self._bottom = rings[0], rings[-1]
        links = [
            TierLink("disk" if tier.below is None else "copy", tier, ring)
            for tier, ring in zip(cache.tiers, rings, strict=True)
        ]
        self._loop = SimulatedLoop(links, rings, self._clock, self._predictor, timeline=timeline)
        self._answers: list[tuple[Forecasts, int, float]] = []
        """Those of the routed layer, until its experts are requested."""
        self._expert_times: dict[int, float] = {}
        """Time of an expert by its number of tokens."""

    @property
    def now(self) -> float:
        """Clock of the compute stream, in seconds."""
        return self._clock.now

    @property
    def stall_seconds(self) -> float:
        """Time that the computation waited for experts and loads."""
        return self._loop.stall_seconds

    @property
    def predictor_seconds(self) -> float:
        """Time of predictions."""
        return self._predictor.busy_seconds

    def begin_step(self) -> None:
        """Starts a forward pass and computes what is outside of its layers.

        Forecasts for the last pass are late. A predictor with a state completes its events first.
        """
        self._predictor.drop_late(None)
        while self._predictor.must_finish():
            self._loop.pump()
            self._loop.wait()
        if self._step_seconds:
            self.compute(self._step_seconds)

    # ---- the predictor

    def forecast(self, forecasts: Forecasts, layer_now: int, seconds: float) -> None:
        """Schedules the predictor's answer to an event for the time when it has been computed.

        It takes `seconds` after the answers to earlier events; a synchronous system computes
        nothing else meanwhile.
        """
        if not self._is_synchronous:
            self._predictor.predict(seconds, forecasts, layer_now)
            return
        self._predictor.busy_seconds += seconds
        self.compute(seconds)
        self._scheduler.schedule(forecasts, layer_now)
        self._loop.pump()  # the transfers start before the router runs

    def forecast_after_requests(self, forecasts: Forecasts, layer_now: int, seconds: float) -> None:
        """Schedules the answer to a router's event when its layer's experts are requested, as live.

        What the layer lacks is on its way while a synchronous system forecasts.
        """
        self._answers.append((forecasts, layer_now, seconds))

    def _forecast_requested(self) -> None:
        answers, self._answers = self._answers, []
        for forecasts, layer_now, seconds in answers:
            self.forecast(forecasts, layer_now, seconds)

    def score_reuse(self, seconds: float, *, is_awaited: bool) -> None:
        """Charges the reuse predictor's scores of a layer, which its requests evict by.

        The step waits for them if something is evicted; otherwise they take the predictor's time.
        """
        if is_awaited or self._is_synchronous:
            self._predictor.busy_seconds += seconds
            self.compute(seconds)
        else:
            self._predictor.predict(seconds, [], 0)

    # ---- other bytes than experts

    def start_load(self, num_bytes: int) -> None:
        """Starts a transfer to the device, such as of KV caches, in parallel with experts'.

        Both have `Overheads.transfer_speed_together` of the link's speed.
        """
        assert not self._top.is_loading(), "one load at a time"
        self._top.load(self._hardware.transfer_seconds(num_bytes))

    def finish_load(self) -> None:
        """Waits for the end of the last load."""
        started = self.now
        while self._top.is_loading():
            self._loop.pump()
            self._loop.wait()
        self._loop.stall_seconds += self.now - started

    # ---- the compute stream

    def compute(self, seconds: float, expert: Expert | None = None) -> None:
        """Computes for a while: one expert, or a layer's other weights."""
        clock, bottom, loop = self._clock, self._bottom, self._loop
        started, left = clock.now, seconds
        bottom.set_computing(True)
        while True:
            loop.pump()
            speed = self._compute_speed_transferring if bottom.num_experts else 1.0
            end = clock.now + left / speed
            event = loop.next_event()
            if event > end:
                break
            left = max(0.0, left - (event - clock.now) * speed)
            loop.wait()
        clock.now = end
        bottom.set_computing(False)
        if loop.timeline is not None and expert is not None:
            loop.timeline.computed(expert, started, end)

    def run_experts(
        self, layer: int, tokens_per_expert: dict[int, int], computed_after: float = 0.0
    ) -> None:
        """Requests, waits for and computes the experts that the layer's router has chosen.

        `computed_after`: seconds until the tokens arrive from other devices.
        """
        cache = self._cache
        self._predictor.drop_late(layer)
        on_host, host_seconds = NOTHING_ON_HOST
        if self._hybrid is not None:
            on_host, host_seconds = self._split(layer, tokens_per_expert)
        pending = cache.request_routed(layer, tokens_per_expert, on_host)
        self._forecast_requested()
        host_end = self._clock.now + host_seconds
        if computed_after:
            self.compute(computed_after)
        while pending:
            candidates = cache.next_candidates(layer, pending)
            e = self._loop.wait_for(cache, layer, candidates)
            pending.remove(e)
            expert = layer, e
            self.compute(self._expert_seconds(tokens_per_expert[e]), expert)
            cache.release(expert)
        if on_host:
            self._wait_until(host_end)
            cache.release_below(layer, on_host)

    def _split(self, layer: int, tokens_per_expert: dict[int, int]) -> tuple[frozenset[int], float]:
        """Returns the experts that the host's processor computes, and the time that it takes."""
        assert self._hybrid is not None
        missed = self._cache.missed_in_host_memory(layer, tokens_per_expert)
        if not missed:
            return NOTHING_ON_HOST
        tokens = {e: tokens_per_expert[e] for e in missed}
        costs = self._hybrid.split_costs(math.ceil(sum(tokens.values()) / len(tokens)))
        on_host, _ = choose_host_experts(tokens, costs)
        return on_host, costs.host_side([tokens[e] for e in on_host])

    def _wait_until(self, end: float) -> None:
        """Waits for the host's processor while transfers go on."""
        started = self.now
        self._loop.pump()
        while self._loop.next_event() <= end:
            self._loop.wait()
            self._loop.pump()
        self._clock.now = max(self.now, end)
        self._loop.stall_seconds += self.now - started

    def run_experts_by_batch(self, layer: int, batches: Sequence[dict[int, int]]) -> None:
        """Requests what the whole group needs and computes it micro-batch by micro-batch.

        An expert is released when the last micro-batch that needs it has computed it.
        """
        self._predictor.drop_late(layer)
        tokens_per_expert: Counter[int] = Counter()
        for batch in batches:
            tokens_per_expert.update(batch)
        self._cache.request_routed(layer, tokens_per_expert)
        self._forecast_requested()
        uses = deque(use for batch in batches for use in sorted(batch.items()))
        while uses:
            e, num_tokens = uses[0]
            self._cache.make_room(layer, e, list(dict.fromkeys(e for e, _ in uses)))
            self._loop.wait_for(self._cache, layer, [e])
            self.compute(self._expert_seconds(num_tokens), (layer, e))
            uses.popleft()
            if all(e != later for later, _ in uses):
                self._cache.release((layer, e))

    def _expert_seconds(self, num_tokens: int) -> float:
        seconds = self._expert_times.get(num_tokens)
        if seconds is None:
            seconds = self._expert_times[num_tokens] = self._hardware.expert_seconds(num_tokens)
        return seconds
