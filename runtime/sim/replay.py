"""Replays recorded steps through a predictor and a system, on a simulated machine."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from predictors.base import Predictor, Signal
from predictors.spec import ModelSpec
from runtime.config import ORACLE, SystemConfig
from runtime.policy.build import (
    adapt_to_link,
    build_device_cache,
    build_multi_device_cache,
    build_scheduler,
)
from runtime.policy.counters import CacheCounters, sum_counters
from runtime.policy.multi_device_cache import DeviceCaches
from runtime.sim.cluster import Interconnect, SimulatedCluster
from runtime.sim.hardware import Hardware, count_tier_slots
from runtime.sim.routing import OraclePredictor, RecordedRouting, count_tokens
from runtime.sim.simulator import Observer, Simulator
from runtime.sim.step import RecordedStep, replay_step


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
    stall_seconds: float = 0.0
    """Time that the computation waited for experts."""
    predictor_seconds: float = 0.0
    """Time of predictions."""
    decode_stall_seconds: float = 0.0
    """The part of `stall_seconds` in decode steps."""
    decode_predictor_seconds: float = 0.0
    """The part of `predictor_seconds` in decode steps; predictions overlap the computation."""

    @property
    def stall_share(self) -> float | None:
        """Share of all steps' time that was a stall; None before the first step."""
        return self.stall_seconds / self.total_seconds if self.total_seconds else None

    @property
    def total_seconds(self) -> float:
        return sum(self.tpot_seconds) + sum(self.ttft_seconds)

    @property
    def total(self) -> CacheCounters:
        return sum_counters([*self.prefill, *self.decode])

    def as_dict(self) -> dict[str, Any]:
        """Returns sums and rates of each phase and quantiles of the times; null if not measured."""
        return {
            **{
                phase: {
                    **asdict(sum_counters(layers)),
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


def replay(
    steps: Iterable[RecordedStep],
    predictor: Predictor | None,
    *,
    spec: ModelSpec,
    system: SystemConfig,
    hardware: Hardware,
    budget_slots: int | Sequence[int],
    reuse_predictor: Predictor | None = None,
    observer: Observer | None = None,
    interconnect: Interconnect | None = None,
) -> ReplayStats:
    """Runs the steps one after another from empty caches.

    A step with several tokens of a request counts as a prefill (TTFT), one with a single token of
    each of its requests as a decode step (TPOT). Belady eviction and the oracle need the whole
    routing before the first step, so all steps are held at once. A system whose predictor is
    `oracle` is the bound: the better of experts fetched whole, which pays the link's latency once,
    and chunk by chunk, where the tiers' links overlap.

    Args:
        steps: Recorded steps; `batch_steps` makes steps of several requests.
        predictor: What to forecast with; ignored by the bound.
        spec: The model.
        system: What to fetch and to evict.
        hardware: The machine, or each of its devices if there is an `interconnect`.
        budget_slots: Experts in the computing tier, or in each tier, the computing one first. With
            one number and a machine whose host memory is too small for all experts, host memory is
            a second tier, filled from the first layer on (MoE-Infinity, sequence level, section
            6.1).
        reuse_predictor: A `predictors.reuse` predictor for `reuse` eviction; its time is not
            charged, for the scores are not needed before the next miss.
        observer: Called with what happens; of several devices, with events of the first.
        interconnect: Several devices, over which experts are spread.
    """
    if system.predictor == ORACLE:
        steps = list(steps)
        future = RecordedRouting(steps, spec)
        # Knowing takes no time.
        hardware = replace(hardware, predictor_seconds=0.0)

        def run_oracle(chunked: bool, observer: Observer | None = None) -> ReplayStats:
            return replay(
                steps,
                OraclePredictor(spec, future),
                spec=spec,
                system=replace(system, predictor=None, chunked=chunked),
                hardware=hardware,
                budget_slots=budget_slots,
                reuse_predictor=reuse_predictor,
                observer=observer,
                interconnect=interconnect,
            )

        bounds = {chunked: run_oracle(chunked) for chunked in (False, True)}
        best = min(bounds, key=lambda chunked: bounds[chunked].total_seconds)
        return bounds[best] if observer is None else run_oracle(best, observer)
    if system.eviction == "belady":
        steps = list(steps)
        options = {**system.eviction_options, "future": RecordedRouting(steps, spec)}
        system = replace(system, eviction_options=options)
    fills_host = isinstance(budget_slots, int)
    if interconnect is not None:
        hardware = interconnect.device_hardware(hardware)
    if isinstance(budget_slots, int):
        budget_slots = count_tier_slots(hardware, budget_slots, spec.num_layers * spec.num_experts)
    slows_computing = hardware.overheads.compute_speed_transferring < 1
    system = adapt_to_link(system, slows_computing=slows_computing)
    chunk_bytes = [hardware.chunk_bytes] * spec.num_layers
    active = predictor if system.prefetch else None
    cache: DeviceCaches
    simulator: Simulator | SimulatedCluster
    if interconnect is None:
        cache = build_device_cache(system, spec, num_slots=budget_slots, chunk_bytes=chunk_bytes)
        devices = [cache]
    else:
        num_slots = [budget_slots] * interconnect.num_devices
        cache = build_multi_device_cache(system, spec, num_slots=num_slots, chunk_bytes=chunk_bytes)
        devices = list(cache.devices)
    schedulers = [build_scheduler(system, spec, device) for device in devices]
    simulators = [
        Simulator(device, hardware, scheduler=scheduler, observer=None if i else observer)
        for i, (device, scheduler) in enumerate(zip(devices, schedulers, strict=True))
    ]
    if interconnect is None:
        (simulator,) = simulators
    else:
        simulator = SimulatedCluster(simulators, devices, interconnect)
    if fills_host:
        cache.fill_lower_tiers(spec.num_experts)
    stats = ReplayStats(
        prefill=[CacheCounters() for _ in range(spec.num_layers)],
        decode=[CacheCounters() for _ in range(spec.num_layers)],
    )
    tokens_at_once = int if interconnect is None else interconnect.tokens_at_once
    running: set[int] = set()
    for step in steps:
        requests = set(step.requests_T.tolist())
        is_prefill = len(step.tokens_T) > len(requests)
        cache.counters = stats.prefill if is_prefill else stats.decode
        cache.begin_step(new_request=not requests <= running)
        # A prefill ends no other request: those of a batch go on after it.
        running = requests | running if is_prefill else requests
        start, stall_seconds = simulator.now, simulator.stall_seconds
        predictor_seconds = simulator.predictor_seconds
        _simulate_step(
            simulator,
            active,
            step,
            spec=spec,
            layer_seconds=hardware.layer_seconds(tokens_at_once(len(step.tokens_T))),
            reuse_predictor=reuse_predictor,
        )
        cache.end_step()
        times = stats.ttft_seconds if is_prefill else stats.tpot_seconds
        times.append(simulator.now - start)
        if is_prefill:
            continue
        stats.decode_stall_seconds += simulator.stall_seconds - stall_seconds
        stats.decode_predictor_seconds += simulator.predictor_seconds - predictor_seconds
        for scheduler in schedulers:
            if scheduler.adaptive_prefetch is not None:
                scheduler.adaptive_prefetch.record_step(times[-1])
    stats.stall_seconds = simulator.stall_seconds
    stats.predictor_seconds = simulator.predictor_seconds
    return stats


def _simulate_step(
    simulator: Simulator | SimulatedCluster,
    predictor: Predictor | None,
    step: RecordedStep,
    *,
    spec: ModelSpec,
    layer_seconds: float,
    reuse_predictor: Predictor | None,
) -> None:
    """Runs one forward pass, in which a layer without its experts takes `layer_seconds`."""
    simulator.begin_step()
    events = replay_step(predictor, step, num_layers=spec.num_layers)
    reuse_events = replay_step(reuse_predictor, step, num_layers=spec.num_layers)
    for event, reuse_event in zip(events, reuse_events, strict=True):
        simulator.forecast(event.forecasts, layer_now=event.layer_now)
        if event.signal is Signal.LAYER_INPUT:
            simulator.compute(layer_seconds)
        elif event.signal is Signal.ROUTED:
            for forecast in reuse_event.forecasts:
                simulator.on_reuse_scores(event.layer, forecast.scores_TE[0])
            experts_TK = step.experts(event.layer)
            simulator.run_experts(event.layer, count_tokens(experts_TK, spec.num_experts))
