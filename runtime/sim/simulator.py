"""Discrete-event simulation of one device: the live transfer loop over simulated rings."""

import functools
import math
from collections.abc import Sequence

from predictors.base import Forecasts, Ints
from predictors.spec import ModelSpec
from runtime.config import SystemConfig
from runtime.policy.build import build_device_cache
from runtime.policy.counters import CacheCounters
from runtime.policy.device_cache import DeviceCache, count_tokens
from runtime.policy.eviction.base import Expert
from runtime.policy.forecast_payoff import ForecastPayoff
from runtime.policy.forecast_scheduler import ForecastScheduler
from runtime.policy.placement import ExpertPlacement, choose_host_experts
from runtime.sim.hardware import Hardware, count_tier_slots, hybrid_hardware
from runtime.sim.machine import (
    SimulatedClock,
    SimulatedLoop,
    SimulatedPredictor,
    SimulatedRing,
)
from runtime.sim.step import RecordedStep
from runtime.transfer.loop import TierLink, TimelineSink


class Simulator:
    """Runs the transfer loop with the clock of the compute stream."""

    def __init__(
        self,
        cache: DeviceCache,
        hardware: Hardware,
        *,
        spec: ModelSpec,
        timeline: TimelineSink | None = None,
        is_stateless: bool = False,
    ):
        """Makes a simulator at time 0.

        Args:
            cache: Cache of the device, whose transfers are simulated.
            hardware: Times of the machine.
            spec: The model.
            timeline: Gets the spans of transfers, stalls and computed experts.
            is_stateless: The predictor may leave out an event whose forecasts would be late.
        """
        overheads = hardware.overheads
        self.cache = cache
        self.spec = spec
        self.hardware = hardware
        self._hybrid = hybrid_hardware(cache.system, hardware)
        self._scheduler = scheduler = ForecastScheduler(cache, top_k=spec.top_k)
        self._step_seconds = overheads.step_seconds
        self._compute_speed_transferring = overheads.compute_speed_transferring
        self._is_synchronous = overheads.predictor_inline or cache.system.synchronous
        self._clock = SimulatedClock()
        self._predictor = SimulatedPredictor(self._clock, scheduler, is_stateless=is_stateless)
        rings = [
            SimulatedRing(
                self._clock,
                functools.partial(hardware.transfer_seconds, tier=i),
                num_readers=overheads.num_readers if tier.below is None else 1,
                speed_together=overheads.transfer_speed_together,
                speed_computing=overheads.transfer_speed_computing,
            )
            for i, tier in enumerate(cache.tiers)
        ]
        self.top, self._bottom = rings[0], rings[-1]
        links = [
            TierLink("disk" if tier.below is None else "copy", tier, ring)
            for tier, ring in zip(cache.tiers, rings, strict=True)
        ]
        self.loop = SimulatedLoop(links, rings, self._clock, self._predictor, timeline=timeline)
        self.uses_forecasts = self.predicts_reuse = True
        """Whether forecasts, and predictions of reuse, are made in the steps to come."""
        self.inline_seconds = self.reuse_seconds = 0.0
        """Time that the computation gave to forecasts, and to predictions of reuse."""
        self.payoff = ForecastPayoff(self, cache, self.loop) if cache.system.adaptive else None
        """Turns them off where they do not pay; None: they are always made."""
        self._answers: list[tuple[Forecasts, int, float]] = []
        """Those of the routed layer, until its experts are requested."""
        self.layer_seconds = functools.cache(hardware.layer_seconds)
        """Returns the time of a layer without its experts, by the number of tokens."""
        self.expert_seconds = functools.cache(hardware.expert_seconds)
        """Returns the time of an expert by its number of tokens."""

    @property
    def now(self) -> float:
        """Clock of the compute stream, in seconds."""
        return self._clock.now

    @property
    def stall_seconds(self) -> float:
        """Time that the computation waited."""
        return self.loop.stall_seconds

    @property
    def predictor_seconds(self) -> float:
        """Time of predictions."""
        return self._predictor.busy_seconds

    # ---- events of a step

    def begin_step(self, requests_T: Ints, counters: list[CacheCounters]) -> None:
        """Starts a forward pass, counted in `counters`, and computes what is outside of its layers.

        Forecasts for the last pass are late. A predictor with a state completes its events first.
        """
        self.cache.top.counters = counters
        if self.payoff is not None:
            self.payoff.begin_step()
        self.cache.begin_step(requests_T)
        self._predictor.drop_late(None)
        while self._predictor.must_finish():
            self.loop.pump()
            self.loop.wait()
        if self._step_seconds:
            self.compute(self._step_seconds)

    def run_dense(self, step: RecordedStep, layer: int) -> None:  # noqa: ARG002
        """Computes a layer without its experts."""
        self.compute(self.layer_seconds(len(step.tokens_T)))

    def run_routed(
        self, step: RecordedStep, layer: int, scores: Forecasts, score_seconds: float
    ) -> None:
        """Runs a layer from its router's choice on.

        Args:
            step: The forward pass.
            layer: Number of the layer.
            scores: Those of the reuse predictor, which come before the requests if these evict.
            score_seconds: What they take.
        """
        experts_TK = step.experts(layer)
        chosen = count_tokens(experts_TK, self.spec.num_experts)
        is_awaited = bool(scores) and self.cache.lacks(layer, chosen)
        if scores:
            self.charge_scores(score_seconds, is_awaited=is_awaited)
        if is_awaited:
            self.give_scores(scores)
        self.cache.on_tokens_routed(layer, experts_TK)
        self.run_chosen(step, layer, chosen)
        if not is_awaited:
            self.give_scores(scores)

    def run_chosen(self, step: RecordedStep, layer: int, chosen: dict[int, int]) -> None:  # noqa: ARG002
        """Computes the experts of a layer that all of a step is routed to."""
        self.run_experts(layer, chosen)

    def end_step(self) -> None:
        self.cache.end_step()

    # ---- the predictors

    def forecast(self, forecasts: Forecasts, layer_now: int, seconds: float) -> None:
        """Schedules the predictor's answer to an event for the time when it has been computed.

        It takes `seconds` after the answers to earlier events; a synchronous system computes
        nothing else meanwhile.
        """
        if not self._is_synchronous:
            self._predictor.predict(seconds, forecasts, layer_now)
            return
        self._predictor.busy_seconds += seconds
        self.inline_seconds += seconds
        self.compute(seconds)
        self._scheduler.schedule(forecasts, layer_now)
        self.loop.pump()  # the transfers start before the router runs

    def forecast_after_requests(self, forecasts: Forecasts, layer_now: int, seconds: float) -> None:
        """Schedules the answer to a router's event when its layer's experts are requested, as live.

        What the layer lacks is on its way while a synchronous system forecasts.
        """
        self._answers.append((forecasts, layer_now, seconds))

    def charge_scores(self, seconds: float, *, is_awaited: bool) -> None:
        """Charges the reuse predictor's scores of a layer, which its requests evict by.

        The step waits for them if something is evicted; otherwise they take the predictor's time.
        """
        if is_awaited or self._is_synchronous:
            self._predictor.busy_seconds += seconds
            self.reuse_seconds += seconds
            self.compute(seconds)
        else:
            self._predictor.predict(seconds, [], 0)

    def give_scores(self, scores: Forecasts) -> None:
        for score in scores:
            self.cache.on_reuse_scores(score.layer, score.scores_TE)

    # ---- the compute stream

    def compute(self, seconds: float, expert: Expert | None = None) -> None:
        """Computes for a while: one expert, or a layer's other weights."""
        clock, bottom, loop = self._clock, self._bottom, self.loop
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
        cache = self.cache
        on_host, host_seconds = self._split(layer, tokens_per_expert)
        pending = self.begin_requests(layer, tokens_per_expert, on_host)
        host_end = self._clock.now + host_seconds
        if computed_after:
            self.compute(computed_after)
        while pending:
            candidates = cache.next_candidates(layer, pending)
            e = self.loop.wait_for(cache, layer, candidates)
            pending.remove(e)
            expert = layer, e
            self.compute(self.expert_seconds(tokens_per_expert[e]), expert)
            cache.release(expert)
        if on_host:
            self._wait_until(host_end)
            cache.release_below(layer, on_host)

    def begin_requests(
        self, layer: int, chosen: dict[int, int], on_host: frozenset[int] = frozenset()
    ) -> list[int]:
        """Requests a layer's chosen experts, then forecasts; returns their computing order."""
        self._predictor.drop_late(layer)
        pending = self.cache.request_routed(layer, chosen, on_host)
        answers, self._answers = self._answers, []
        for forecasts, layer_now, seconds in answers:
            self.forecast(forecasts, layer_now, seconds)
        return pending

    def _split(self, layer: int, tokens_per_expert: dict[int, int]) -> tuple[frozenset[int], float]:
        """Returns the experts that the host's processor computes, and the time that it takes."""
        if self._hybrid is None or not (
            missed := self.cache.missed_in_host_memory(layer, tokens_per_expert)
        ):
            return frozenset(), 0.0
        tokens = {e: tokens_per_expert[e] for e in missed}
        costs = self._hybrid.split_costs(math.ceil(sum(tokens.values()) / len(tokens)))
        on_host, _ = choose_host_experts(tokens, costs)
        others = [e for e in tokens_per_expert if e not in on_host]
        below = self.cache.top.below
        is_full = below is not None and len(on_host) == below.cache.share(layer)
        if is_full and not all(self.cache.is_ready((layer, e)) for e in others):
            # The others come through a slot of host memory, where all would be pinned.
            on_host -= {max(on_host, key=lambda e: (tokens[e], e))}
        return on_host, costs.host_side([tokens[e] for e in on_host])

    def _wait_until(self, end: float) -> None:
        """Waits for the host's processor while transfers go on."""
        started = self.now
        self.loop.pump()
        while self.loop.next_event() <= end:
            self.loop.wait()
            self.loop.pump()
        self._clock.now = max(self.now, end)
        self.loop.stall_seconds += self.now - started


def make_simulator(
    system: SystemConfig,
    spec: ModelSpec,
    hardware: Hardware,
    *,
    budget_slots: int | Sequence[int],
    placement: ExpertPlacement | None = None,
    device: int = 0,
    kind: type[Simulator] = Simulator,
    timeline: TimelineSink | None = None,
    is_stateless: bool = False,
) -> Simulator:
    """Returns a simulated device.

    Args:
        system: What to fetch and to evict.
        spec: The model.
        hardware: The device.
        budget_slots: Experts in the computing tier, or in each tier, as for `replay`.
        placement: Experts of each of several devices; None: the only one has all.
        device: Number of the device.
        kind: Its class.
        timeline: Gets the spans of transfers, stalls and computed experts.
        is_stateless: The predictor may leave out an event whose forecasts would be late.
    """
    fills_host = isinstance(budget_slots, int)
    if isinstance(budget_slots, int):
        budget_slots = count_tier_slots(hardware, budget_slots, spec.num_layers * spec.num_experts)
    cache = build_device_cache(
        system,
        spec,
        num_slots=[budget_slots],
        chunk_bytes=[hardware.chunk_bytes] * spec.num_layers,
        placement=placement,
        device=device,
    )
    if fills_host or system.fill_first_layers:
        cache.fill()
    return kind(cache, hardware, spec=spec, timeline=timeline, is_stateless=is_stateless)
