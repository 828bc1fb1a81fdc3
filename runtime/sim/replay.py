"""Replays recorded steps through a predictor and a system, on a machine that need not be here."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
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
from runtime.sim.cluster import Cluster, Interconnect
from runtime.sim.hardware import Hardware, tier_slots
from runtime.sim.oracle import bound
from runtime.sim.routing import routing, tokens_per_expert
from runtime.sim.simulator import Observer, Simulator
from runtime.sim.step import RecordedStep, replay_step


@dataclass
class ReplayStats:
    """Times in simulated seconds; counters of the policy core, by the phase they arose in.

    The phases are kept apart because one prefill asks for almost every expert of a layer, more
    than a small arena holds, while a decode step asks for top_k.
    """

    prefill: list[CacheCounters]
    decode: list[CacheCounters]
    ttft_seconds: list[float] = field(default_factory=list)
    tpot_seconds: list[float] = field(default_factory=list)
    """Of each prefill and of each decode step, in the order of the run."""
    stall_seconds: float = 0.0
    """The computation waited for experts."""
    predictor_seconds: float = 0.0
    """Charged to predictions."""
    decode_stall_seconds: float = 0.0
    """Of these, in decode steps."""
    decode_predictor_seconds: float = 0.0
    """Charged to predictions in decode steps; they run beside the computation."""

    @property
    def stall_share(self) -> float | None:
        """Share of all steps' time that was spent waiting; None before the first step."""
        total = sum(self.ttft_seconds) + sum(self.tpot_seconds)
        return self.stall_seconds / total if total else None

    @property
    def total(self) -> CacheCounters:
        return sum_counters([*self.prefill, *self.decode])

    def as_dict(self) -> dict[str, Any]:
        """Sums and rates for each phase, medians of the times; null where nothing was counted."""
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
    """The median under the name itself, 95th and 99th percentiles (linear) beside it."""
    shares = {name: 50, f"{name}_p95": 95, f"{name}_p99": 99}
    if not times:
        return dict.fromkeys(shares)
    return {key: float(np.percentile(times, share)) for key, share in shares.items()}


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
    """Runs the steps one after another from empty arenas of `budget_slots` experts.

    Several numbers are those of several tiers, the computing one first. With one number and a
    machine whose host memory is too small for all experts, that is the second tier, filled from the
    first layer on (moe-infinity-sequence-level 6.1).

    `reuse_predictor`, a `predictors.reuse` forecaster, gives `reuse` eviction its scores; its time
    is not charged, for the scores are not needed before the next miss.

    A step with several tokens of a request counts as a prefill (TTFT), one with a single token of
    each of its requests as a decode (TPOT); `batch_steps` makes steps of several requests.
    Belady eviction is told the whole routing before the first step, so all steps are held at once.
    A system that forecasts with `oracle` is the bound (`runtime.sim.oracle`), whatever `predictor`.

    With an `interconnect`, experts are spread over its devices, of which each is the `hardware` and
    has `budget_slots` (`runtime.sim.cluster`); an observer is told of one device only.
    """
    if system.predictor == ORACLE:
        # The bound knows; it computes nothing to know it.
        hardware = replace(hardware, predictor_seconds=0.0)  # type: ignore[type-var]
    run = partial(
        _run,
        spec=spec,
        hardware=hardware,
        budget_slots=budget_slots,
        reuse_predictor=reuse_predictor,
        interconnect=interconnect,
    )
    if system.predictor == ORACLE:
        return bound(list(steps), spec, system, run=run, observer=observer)
    return run(steps, predictor, system=system, observer=observer)


def _run(
    steps: Iterable[RecordedStep],
    predictor: Predictor | None,
    *,
    spec: ModelSpec,
    system: SystemConfig,
    hardware: Hardware,
    budget_slots: int | Sequence[int],
    reuse_predictor: Predictor | None,
    observer: Observer | None,
    interconnect: Interconnect | None,
) -> ReplayStats:
    if system.eviction == "belady":
        steps = list(steps)
        options = {**system.eviction_options, "future": routing(steps, spec)}
        system = replace(system, eviction_options=options)
    filled = isinstance(budget_slots, int)
    if interconnect is not None:
        hardware = interconnect.of_device(hardware)
    if isinstance(budget_slots, int):
        budget_slots = tier_slots(hardware, budget_slots, spec.num_layers * spec.num_experts)
    slowed = hardware.overheads.compute_speed_transferring < 1
    system = adapt_to_link(system, slows_computing=slowed)
    chunk_bytes = [hardware.chunk_bytes] * spec.num_layers
    active = predictor if system.prefetch else None
    simulate = partial(Simulator, hardware=hardware, predictor=active)
    cache: DeviceCaches
    simulator: Simulator | Cluster
    if interconnect is None:
        cache = build_device_cache(system, spec, num_slots=budget_slots, chunk_bytes=chunk_bytes)
        schedulers = [build_scheduler(system, spec, cache)]
        simulator = simulate(cache, scheduler=schedulers[0], observer=observer)
    else:
        cache = build_multi_device_cache(
            system,
            spec,
            num_slots=[budget_slots] * interconnect.num_devices,
            chunk_bytes=chunk_bytes,
        )
        schedulers = [build_scheduler(system, spec, shard) for shard in cache.devices]
        watchers = [observer] + [None] * (len(schedulers) - 1)
        simulators = [
            simulate(shard, scheduler=scheduler, observer=watcher)
            for shard, scheduler, watcher in zip(cache.devices, schedulers, watchers, strict=True)
        ]
        simulator = Cluster(simulators, cache.devices, interconnect)
    if filled:
        cache.fill_lower_tiers(spec.num_experts)
    stats = ReplayStats(
        prefill=[CacheCounters() for _ in range(spec.num_layers)],
        decode=[CacheCounters() for _ in range(spec.num_layers)],
    )
    at_once = int if interconnect is None else interconnect.tokens_at_once
    running: set[int] = set()
    for step in steps:
        requests = set(step.requests_T.tolist())
        is_prefill = len(step.tokens_T) > len(requests)
        cache.counters = stats.prefill if is_prefill else stats.decode
        cache.begin_step(new_request=not requests <= running)
        # A prefill ends no other request: those of a batch go on after it.
        running = requests | running if is_prefill else requests
        started, stalled = simulator.now, simulator.stall_seconds
        predicting = simulator.predictor_seconds
        simulate_step(
            simulator,
            active,
            step,
            spec=spec,
            layer_seconds=hardware.layer_seconds(at_once(len(step.tokens_T))),
            reuse_predictor=reuse_predictor,
        )
        cache.end_step()
        times = stats.ttft_seconds if is_prefill else stats.tpot_seconds
        times.append(simulator.now - started)
        if not is_prefill:
            stats.decode_stall_seconds += simulator.stall_seconds - stalled
            stats.decode_predictor_seconds += simulator.predictor_seconds - predicting
        for scheduler in schedulers if not is_prefill else ():
            if scheduler.adaptive_prefetch is not None:
                scheduler.adaptive_prefetch.record_step(times[-1])
    stats.stall_seconds = simulator.stall_seconds
    stats.predictor_seconds = simulator.predictor_seconds
    return stats


def simulate_step(
    simulator: Simulator | Cluster,
    predictor: Predictor | None,
    step: RecordedStep,
    *,
    spec: ModelSpec,
    layer_seconds: float,
    reuse_predictor: Predictor | None = None,
) -> None:
    """Runs one forward pass, in which a layer without its experts takes `layer_seconds`."""
    simulator.begin_step()
    events = replay_step(predictor, step, num_layers=spec.num_layers)
    values = replay_step(reuse_predictor, step, num_layers=spec.num_layers)
    for event, value in zip(events, values, strict=True):
        simulator.forecast(event.forecasts, layer_now=event.layer_now)
        if event.signal is Signal.LAYER_INPUT:
            simulator.compute(layer_seconds)
        elif event.signal is Signal.ROUTED:
            for forecast in value.forecasts:
                simulator.valued(event.layer, forecast.scores_TE[0])
            experts_TK = step.experts(event.layer)
            simulator.run_experts(event.layer, tokens_per_expert(experts_TK, spec.num_experts))
