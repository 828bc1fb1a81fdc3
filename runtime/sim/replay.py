"""Replays recorded steps through a predictor and a system, on a simulated machine."""

import gc
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from predictors.base import Predictor, Signal
from predictors.spec import ModelSpec
from runtime.config import SystemConfig
from runtime.policy.build import adapt_to_link
from runtime.policy.counters import CacheCounters, sum_counters
from runtime.sim.hardware import Hardware, prediction_seconds
from runtime.sim.simulator import make_simulator
from runtime.sim.step import RecordedRouting, RecordedStep, replay_step
from runtime.transfer.loop import TimelineSink

COLLECT_AFTER = 100_000
"""Objects that are made, and not freed, before Python's garbage collector looks for cycles."""


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
                    "promoe_good_pred": sum_counters(layers).promoe_good_pred,
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


AnySimulator = Any
"""A `Simulator`, or what has its methods for several devices."""


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
    make_machine: Callable[..., AnySimulator] = make_simulator,
    on_step: Callable[[ReplayStats, RecordedStep], None] = lambda *_: None,
) -> ReplayStats:
    """Runs the steps one after another from empty caches.

    A step with several tokens of a request counts as a prefill (TTFT), one with a single token of
    each of its requests as a decode step (TPOT). A system that knows the future is given the
    routing before the first step, so all steps are held at once.

    Args:
        steps: Recorded steps; `batch_steps` makes steps of several requests.
        predictor: What to forecast with.
        spec: The model.
        system: What to fetch and to evict.
        hardware: The machine.
        budget_slots: Experts in the computing tier, or in each tier, the computing one first. With
            one number and a machine whose host memory is too small for all experts, host memory is
            a second tier, full from the first layer on, or from where the computing tier ends if
            the system begins with that full too.
        reuse_predictor: A `predictors.reuse` predictor for `reuse` eviction.
        timeline: Gets the spans of transfers, stalls and computed experts.
        make_machine: Makes what runs the steps, with the arguments of `make_simulator`.
        on_step: Called after each step.
    """
    if system.knows_future:
        steps = list(steps)
        options = {**system.eviction_options, "future": RecordedRouting(steps, spec)}
        system = replace(system, eviction_options=options)
    slows_computing = hardware.overheads.compute_speed_transferring < 1
    system = adapt_to_link(system, slows_computing=slows_computing)
    active = predictor if system.prefetch else None
    simulator = make_machine(
        system,
        spec,
        hardware,
        budget_slots=budget_slots,
        timeline=timeline,
        is_stateless=active is not None and active.stateless and reuse_predictor is None,
    )
    stats = ReplayStats(
        prefill=[CacheCounters() for _ in range(spec.num_layers)],
        decode=[CacheCounters() for _ in range(spec.num_layers)],
    )
    was_prefill = False
    for step in steps:
        requests = set(step.requests_T.tolist())
        is_prefill = len(step.tokens_T) > len(requests)
        start, stall_seconds = simulator.now, simulator.stall_seconds
        predictor_seconds = simulator.predictor_seconds
        simulator.begin_step(step.requests_T, stats.prefill if is_prefill else stats.decode)
        _run_layers(
            simulator,
            step,
            active,
            reuse_predictor,
            hardware=hardware,
            num_layers=spec.num_layers,
        )
        simulator.end_step()
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
        on_step(stats, step)
        if simulator.payoff is not None and not is_prefill:
            simulator.payoff.record_step(times[-1])
    return stats


def _run_layers(
    simulator: AnySimulator,
    step: RecordedStep,
    predictor: Predictor | None,
    reuse_predictor: Predictor | None,
    *,
    hardware: Hardware,
    num_layers: int,
) -> None:
    """Runs the layers of one forward pass, and the predictors at its events."""
    seconds = prediction_seconds(hardware, predictor, step.requests_T)
    reuse_seconds = prediction_seconds(hardware, reuse_predictor, step.requests_T)
    events = replay_step(predictor, step, num_layers=num_layers)
    reuse_events = replay_step(reuse_predictor, step, num_layers=num_layers)
    for event, reuse_event in zip(events, reuse_events, strict=True):
        if event.forecasts and simulator.uses_forecasts:
            is_routed = event.signal in (Signal.GATE_INPUT, Signal.ROUTED)
            give = simulator.forecast_after_requests if is_routed else simulator.forecast
            give(event.forecasts, layer_now=event.layer_now, seconds=seconds)
        if event.signal is Signal.LAYER_INPUT:
            simulator.run_dense(step, event.layer)
        elif event.signal is Signal.ROUTED:
            scores = reuse_event.forecasts if simulator.predicts_reuse else ()
            simulator.run_routed(step, event.layer, scores, reuse_seconds)
