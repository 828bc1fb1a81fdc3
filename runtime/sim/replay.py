"""Replays recorded steps through a predictor and a system, on a simulated machine."""

import functools
import gc
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

import numpy as np

from predictors.base import Forecasts, Predictor, Signal
from predictors.errors import MoecastError
from predictors.spec import ModelSpec
from runtime.config import SystemConfig
from runtime.policy.adaptive_switch import AdaptiveSwitch
from runtime.policy.build import (
    adapt_to_link,
    build_device_cache,
)
from runtime.policy.counters import CacheCounters, sum_counters
from runtime.policy.device_cache import DeviceCache
from runtime.policy.forecast_scheduler import ForecastScheduler
from runtime.policy.placement import ExpertPlacement
from runtime.sim.group import AnySimulator, simulate_dense, simulate_experts
from runtime.sim.hardware import Hardware, count_tier_slots, hybrid_hardware, prediction_seconds
from runtime.sim.routing import RecordedRouting, count_tokens
from runtime.sim.simulator import Simulator
from runtime.sim.step import RecordedStep, replay_step
from runtime.transfer.timeline import TimelineSink

COLLECT_AFTER = 100_000
"""Objects that are made, and not freed, before Python's garbage collector looks for cycles."""


class StepTotals(NamedTuple):
    """Totals from the start of a run to the end of one of its steps."""

    is_prefill: bool
    """Whether the step is a prefill."""
    num_tokens: int
    """Tokens of the step itself."""
    seconds: float
    """Time of the step itself."""
    prefill_stall_seconds: float
    decode_stall_seconds: float
    prefill_bytes: int
    decode_bytes: int
    requests: int
    """Requested experts of decode steps, as the next four."""
    hits: int
    predicted: int
    predicted_in_time: int
    needed_predicted: int
    needed_predicted_in_time: int


@dataclass
class ReplayStats:
    """Times in simulated seconds, and counters of the cache by the phase that they belong to.

    The phases are kept apart because one prefill requests almost every expert of a layer, more
    than a small cache holds, while a decode step requests top_k.
    """

    prefill: list[CacheCounters]
    decode: list[CacheCounters]
    ttft_seconds: list[float] = field(default_factory=list)
    """Time of each prefill, in the order of the run."""
    tpot_seconds: list[float] = field(default_factory=list)
    """Time of each decode step, in the order of the run."""
    run_starts: list[int] = field(default_factory=list)
    """Index of the first decode step after each prefill that decode steps follow: with one request
    at a time, a run of decode steps is a request."""
    stall_seconds: float = 0.0
    """Time that the computation waited for experts."""
    predictor_seconds: float = 0.0
    """Time of predictions."""
    decode_stall_seconds: float = 0.0
    """The part of `stall_seconds` in decode steps."""
    step_totals: list[StepTotals] = field(default_factory=list)
    """One for each step, in the order of the run."""
    decode_predictor_seconds: float = 0.0
    """The part of `predictor_seconds` in decode steps; a synchronous system waits for it."""

    @property
    def stall_share(self) -> float | None:
        """Share of all steps' time that was a stall; None before the first step."""
        return self.stall_seconds / self.total_seconds if self.total_seconds else None

    @property
    def total_seconds(self) -> float:
        return sum(self.tpot_seconds) + sum(self.ttft_seconds)

    @property
    def decode_runs(self) -> list[list[float]]:
        """Times of the decode steps between two prefills, for each pair of them."""
        ends = [*self.run_starts[1:], len(self.tpot_seconds)]
        return [
            self.tpot_seconds[start:end] for start, end in zip(self.run_starts, ends, strict=True)
        ]

    @property
    def total(self) -> CacheCounters:
        return sum_counters([*self.prefill, *self.decode])

    def as_dict(self) -> dict[str, Any]:
        """Returns sums and rates of each phase and quantiles of the times; null if not measured."""
        return {
            **{
                phase: {
                    **sum_counters(layers).as_dict(),
                    "hit_rate": sum_counters(layers).hit_rate,
                    "fetch_rate": sum_counters(layers).fetch_rate,
                    "joint_rate": sum_counters(layers).joint_rate,
                    "fetch_rate_per_layer": [counters.fetch_rate for counters in layers],
                }
                for phase, layers in (("prefill", self.prefill), ("decode", self.decode))
            },
            **_quantiles("ttft_seconds", self.ttft_seconds),
            **_quantiles("tpot_seconds", self.tpot_seconds),
            "num_decode_steps": len(self.tpot_seconds),
            "stall_seconds": self.stall_seconds,
            "stall_share": self.stall_share,
            "predictor_seconds": self.predictor_seconds,
            "decode_stall_seconds": self.decode_stall_seconds,
            "decode_predictor_seconds": self.decode_predictor_seconds,
        }


def _quantiles(name: str, times: Sequence[float]) -> dict[str, float | None]:
    """Returns the median under `name`, and the 95th and 99th percentiles (linear)."""
    percents = {name: 50, f"{name}_p95": 95, f"{name}_p99": 99}
    if not times:
        return dict.fromkeys(percents)
    return {key: float(np.percentile(times, percent)) for key, percent in percents.items()}


@contextmanager
def rare_collections() -> Iterator[None]:
    """Lets the garbage collector of this process run rarely.

    Steps of a replay leave no cycles, and recorded forecasts are many objects: looking for cycles
    among them takes a tenth of a replay's time.
    """
    before = gc.get_threshold()
    gc.set_threshold(COLLECT_AFTER, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


class SpreadDevices(Protocol):
    """Several devices that experts are spread over, and the links between them."""

    @property
    def num_devices(self) -> int: ...

    def tokens_at_once(self, num_tokens: int) -> int:
        """Returns the tokens of a step that are computed one after another outside of experts."""

    def device_hardware(self, hardware: Hardware) -> Hardware:
        """Returns one device's part of a machine."""

    def connect(
        self, simulators: Sequence[Simulator], devices: Sequence[DeviceCache]
    ) -> AnySimulator:
        """Returns the devices as one simulated machine."""


def replay(
    steps: Iterable[RecordedStep],
    predictor: Predictor | None,
    *,
    spec: ModelSpec,
    system: SystemConfig,
    hardware: Hardware,
    budget_slots: int | Sequence[int],
    reuse_predictor: Predictor | None = None,
    timeline: TimelineSink | None = None,
    interconnect: SpreadDevices | None = None,
) -> ReplayStats:
    """Runs the steps one after another from empty caches.

    A step with several tokens of a request counts as a prefill (TTFT), one with a single token of
    each of its requests as a decode step (TPOT). A system that knows the future is given the
    routing before the first step, so all steps are held at once.

    Args:
        steps: Recorded steps; `batch_steps` makes steps of several requests, `group.GroupStep` one
            of several micro-batches.
        predictor: What to forecast with.
        spec: The model.
        system: What to fetch and to evict.
        hardware: The machine, or each of its devices if there is an `interconnect`.
        budget_slots: Experts in the computing tier, or in each tier, the computing one first. With
            one number and a machine whose host memory is too small for all experts, host memory is
            a second tier, full from the first layer on, or from where the computing tier ends if
            the system begins with that full too.
        reuse_predictor: A `predictors.reuse` predictor for `reuse` eviction.
        timeline: Gets the spans of transfers, stalls and computed experts; of several devices,
            those of the first.
        interconnect: Several devices, over which experts are spread.
    """
    if system.knows_future:
        steps = list(steps)
        options = {**system.eviction_options, "future": RecordedRouting(steps, spec)}
        system = replace(system, eviction_options=options)
    hybrid = hybrid_hardware(system, hardware)
    if hybrid is not None and interconnect is not None:
        raise MoecastError("system.hybrid=true: replays simulate it on one device only")
    fills_host = isinstance(budget_slots, int)
    if interconnect is not None:
        hardware = interconnect.device_hardware(hardware)
    if isinstance(budget_slots, int):
        budget_slots = count_tier_slots(hardware, budget_slots, spec.num_layers * spec.num_experts)
    slows_computing = hardware.overheads.compute_speed_transferring < 1
    system = adapt_to_link(system, slows_computing=slows_computing)
    chunk_bytes = [hardware.chunk_bytes] * spec.num_layers
    active = predictor if system.prefetch else None
    simulator: AnySimulator
    num_devices = 1 if interconnect is None else interconnect.num_devices
    placement = None if interconnect is None else ExpertPlacement(num_devices)
    devices = [
        build_device_cache(
            system,
            spec,
            num_slots=[budget_slots],
            chunk_bytes=chunk_bytes,
            placement=placement,
            device=device,
        )
        for device in range(num_devices)
    ]
    switch = make_switch(system, devices)
    simulators = [
        Simulator(
            device,
            hardware,
            scheduler=ForecastScheduler(device, top_k=spec.top_k),
            timeline=None if i else timeline,
            is_stateless=active is not None and active.stateless and reuse_predictor is None,
            hybrid=hybrid,
        )
        for i, device in enumerate(devices)
    ]
    if interconnect is None:
        (simulator,) = simulators
    else:
        simulator = interconnect.connect(simulators, devices)
    if fills_host or system.fill_first_layers:
        for device in devices:
            device.fill()
    stats = ReplayStats(
        prefill=[CacheCounters() for _ in range(spec.num_layers)],
        decode=[CacheCounters() for _ in range(spec.num_layers)],
    )
    tokens_at_once = int if interconnect is None else interconnect.tokens_at_once

    @functools.cache
    def layer_seconds(num_tokens: int) -> float:
        return hardware.layer_seconds(tokens_at_once(num_tokens))

    was_prefill = False
    for step in steps:
        requests = set(step.requests_T.tolist())
        is_prefill = len(step.tokens_T) > len(requests)
        for device in devices:
            device.top.counters = stats.prefill if is_prefill else stats.decode
            device.begin_step(step.requests_T)
        start, stall_seconds = simulator.now, simulator.stall_seconds
        predictor_seconds = simulator.predictor_seconds
        _simulate_step(
            simulator,
            devices,
            active,
            step,
            spec=spec,
            layer_seconds=layer_seconds,
            predictor_seconds=prediction_seconds(hardware, active, len(step.tokens_T)),
            reuse_predictor=reuse_predictor,
            reuse_seconds=prediction_seconds(hardware, reuse_predictor, len(step.tokens_T)),
            uses_forecasts=switch is None or switch.is_on,
        )
        for device in devices:
            device.end_step()
        times = stats.ttft_seconds if is_prefill else stats.tpot_seconds
        if not is_prefill and (was_prefill or not times):
            stats.run_starts.append(len(times))
        was_prefill = is_prefill
        times.append(simulator.now - start)
        stats.stall_seconds = simulator.stall_seconds
        stats.predictor_seconds = simulator.predictor_seconds
        if not is_prefill:
            stats.decode_stall_seconds += simulator.stall_seconds - stall_seconds
            stats.decode_predictor_seconds += simulator.predictor_seconds - predictor_seconds
        stats.step_totals.append(
            _total_step(stats, is_prefill=is_prefill, num_tokens=len(step.tokens_T))
        )
        if switch is not None and not is_prefill:
            switch.record_step(times[-1])
    return stats


def make_switch(system: SystemConfig, devices: Sequence[DeviceCache]) -> AdaptiveSwitch | None:
    """Returns what turns prefetching off where it does not pay, in idle time too; None: nothing."""

    def set_idle_prefetch(is_on: bool) -> None:
        if system.idle_prefetch:
            for device in devices:
                device.set_idle_prefetch(is_on)

    return AdaptiveSwitch(on_change=set_idle_prefetch) if system.adaptive else None


def _total_step(stats: ReplayStats, *, is_prefill: bool, num_tokens: int) -> StepTotals:
    prefill_bytes = decode_bytes = requests = hits = 0
    predicted = predicted_in_time = needed_predicted = needed_predicted_in_time = 0
    for layer in stats.prefill:
        prefill_bytes += layer.bytes_moved
    for layer in stats.decode:
        decode_bytes += layer.bytes_moved
        requests += layer.requests
        hits += layer.hits
        predicted += layer.predicted
        predicted_in_time += layer.predicted_in_time
        needed_predicted += layer.needed_predicted
        needed_predicted_in_time += layer.needed_predicted_in_time
    return StepTotals(
        is_prefill=is_prefill,
        num_tokens=num_tokens,
        seconds=(stats.ttft_seconds if is_prefill else stats.tpot_seconds)[-1],
        prefill_stall_seconds=stats.stall_seconds - stats.decode_stall_seconds,
        decode_stall_seconds=stats.decode_stall_seconds,
        prefill_bytes=prefill_bytes,
        decode_bytes=decode_bytes,
        requests=requests,
        hits=hits,
        predicted=predicted,
        predicted_in_time=predicted_in_time,
        needed_predicted=needed_predicted,
        needed_predicted_in_time=needed_predicted_in_time,
    )


def _simulate_step(
    simulator: AnySimulator,
    devices: Sequence[DeviceCache],
    predictor: Predictor | None,
    step: RecordedStep,
    *,
    spec: ModelSpec,
    layer_seconds: Callable[[int], float],
    predictor_seconds: float,
    reuse_predictor: Predictor | None,
    reuse_seconds: float,
    uses_forecasts: bool,
) -> None:
    """Runs one forward pass.

    Args:
        layer_seconds: Time of a layer without its experts.
        predictor_seconds: Time of each event that the predictor answers with forecasts.
        reuse_seconds: The same of the reuse predictor.
    """
    simulator.begin_step()
    events = replay_step(predictor, step, num_layers=spec.num_layers)
    reuse_events = replay_step(reuse_predictor, step, num_layers=spec.num_layers)
    for event, reuse_event in zip(events, reuse_events, strict=True):
        if event.forecasts and uses_forecasts:
            is_routed = event.signal in (Signal.GATE_INPUT, Signal.ROUTED)
            give = simulator.forecast_after_requests if is_routed else simulator.forecast
            give(event.forecasts, layer_now=event.layer_now, seconds=predictor_seconds)
        if event.signal is Signal.LAYER_INPUT:
            simulate_dense(
                simulator,
                devices,
                step,
                event.layer,
                num_experts=spec.num_experts,
                layer_seconds=layer_seconds,
            )
        elif event.signal is Signal.ROUTED:
            is_awaited = False
            if reuse_event.forecasts:
                chosen = count_tokens(step.experts(event.layer), spec.num_experts)
                is_awaited = any(device.lacks(event.layer, chosen) for device in devices)
                simulator.score_reuse(reuse_seconds, is_awaited=is_awaited)
            if is_awaited:
                _give_scores(devices, reuse_event.forecasts)
            for device in devices:
                device.on_tokens_routed(event.layer, step.experts(event.layer))
            simulate_experts(
                simulator,
                step,
                event.layer,
                num_experts=spec.num_experts,
                is_last=event.layer + 1 == spec.num_layers,
            )
            if not is_awaited:
                _give_scores(devices, reuse_event.forecasts)


def _give_scores(devices: Sequence[DeviceCache], scores: Forecasts) -> None:
    for device in devices:
        for score in scores:
            device.on_reuse_scores(score.layer, score.scores_TE)
