"""The bound: a time that no system can beat, from the bytes that must move and the computation.

Shape suffixes: W decode steps of a window.
"""

import heapq
import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

from predictors.spec import ModelSpec
from runtime.policy.device_cache import count_tokens
from runtime.policy.eviction.base import Expert
from runtime.sim.hardware import Hardware, count_tier_slots
from runtime.sim.replay import ReplayStats
from runtime.sim.step import RecordedStep

ROUNDING = 1e-9
"""Relative error of sums of times, by which a replay may seem to beat the bound."""

LayerChoices = Sequence[Collection[Expert]]
"""The experts that each routed layer chooses, one layer after another."""


@dataclass(frozen=True)
class StepWork:
    """A forward pass: the time of its computation, and the experts of each layer."""

    is_prefill: bool
    compute_seconds: float
    choices: LayerChoices


@dataclass(frozen=True)
class TimeBound:
    """Times in seconds that no eviction, prefetching or order of computation can beat."""

    prefill_seconds: float
    """Sum over all prefills."""
    decode_seconds: float
    """Sum over all decode steps."""
    num_prefills: int
    num_decode_steps: int

    @property
    def ttft_seconds(self) -> float | None:
        """Mean of a prefill; None without one."""
        return self.prefill_seconds / self.num_prefills if self.num_prefills else None

    @property
    def tpot_seconds(self) -> float | None:
        """Mean of a decode step; None without one."""
        return self.decode_seconds / self.num_decode_steps if self.num_decode_steps else None

    def assert_holds(self, stats: ReplayStats) -> None:
        """Asserts that a replay of the same steps on the same machine does not beat the bound.

        A replay that does shows a mistake in the simulator or here: no table may contain it.
        """
        decode_seconds, prefill_seconds = sum(stats.tpot_seconds), sum(stats.ttft_seconds)
        assert self.decode_seconds <= decode_seconds * (1 + ROUNDING), (self, decode_seconds)
        assert self.prefill_seconds <= prefill_seconds * (1 + ROUNDING), (self, prefill_seconds)


def bound_time(
    steps: Iterable[RecordedStep],
    *,
    spec: ModelSpec,
    hardware: Hardware,
    num_slots: int,
    dense_seconds: Callable[[RecordedStep, Hardware], float] | None = None,
) -> TimeBound:
    """Returns the least time of the steps on this machine, whatever its caches hold at first.

    In any window of consecutive steps, the time is at least that of the computation, and at least
    that of the transfers that even Belady's MIN needs: it misses least of all policies that know
    the future, prefetching or not. The cache may hold whatever is best when a window begins, so
    that nothing is assumed of the time before. The bounds of windows that do not overlap add up.
    Windows of 1, 2, 4... decode steps are tried, and the largest sum counts.

    Args:
        steps: Recorded steps, as for `replay`.
        spec: The model.
        hardware: The machine.
        num_slots: Experts in the computing tier.
        dense_seconds: Time of a layer without its experts; None: all tokens are computed at once.
    """
    dense_seconds = dense_seconds or _dense_seconds
    slots = count_tier_slots(hardware, num_slots, spec.num_layers * spec.num_experts)
    work = [_measure_step(step, spec, hardware, dense_seconds(step, hardware)) for step in steps]
    tiers = [
        (sum(slots[: tier + 1]), _least_transfer_seconds(hardware, tier))
        for tier in range(len(slots))
    ]
    prefill_seconds = decode_seconds = 0.0
    num_decode_steps = 0
    index = 0
    while index < len(work):
        end = index + 1
        if work[index].is_prefill:
            prefill_seconds += _bound_window(work[index:end], tiers)
        else:
            while end < len(work) and not work[end].is_prefill:
                end += 1
            decode_seconds += _bound_run(work[index:end], tiers)
            num_decode_steps += end - index
        index = end
    return TimeBound(
        prefill_seconds, decode_seconds, len(work) - num_decode_steps, num_decode_steps
    )


def _dense_seconds(step: RecordedStep, hardware: Hardware) -> float:
    return hardware.layer_seconds(len(step.tokens_T))


def _measure_step(
    step: RecordedStep, spec: ModelSpec, hardware: Hardware, layer_seconds: float
) -> StepWork:
    num_tokens = len(step.tokens_T)
    seconds = hardware.overheads.step_seconds
    choices = []
    for layer in range(spec.num_layers):
        tokens_per_expert = count_tokens(step.experts(layer), spec.num_experts)
        seconds += layer_seconds
        seconds += sum(map(hardware.expert_seconds, tokens_per_expert.values()))
        choices.append([(layer, e) for e in tokens_per_expert])
    is_prefill = num_tokens > len(set(step.requests_T.tolist()))
    return StepWork(is_prefill, seconds, choices)


def _least_transfer_seconds(hardware: Hardware, tier: int) -> float:
    """Returns the least time in which an expert reaches a tier, of many one after another."""
    # Simultaneous transfers, each at a share of the speed, may move more than one alone.
    overheads = hardware.overheads
    numbers = range(1, overheads.num_readers + 1)
    speed = max(n * overheads.transfer_speed_together ** (n - 1) for n in numbers)
    return hardware.transfer_seconds(sum(hardware.chunk_bytes), tier=tier) / speed


def _bound_run(work: Sequence[StepWork], tiers: Sequence[tuple[int, float]]) -> float:
    """Returns the bound of consecutive decode steps, under the best length of windows."""
    bounds = []
    for power in range(len(work).bit_length() + 1):
        length = min(2**power, len(work))
        windows = (work[i : i + length] for i in range(0, len(work), length))
        bounds.append(sum(_bound_window(window_W, tiers) for window_W in windows))
    return max(bounds)


def _bound_window(window_W: Sequence[StepWork], tiers: Sequence[tuple[int, float]]) -> float:
    seconds = sum(step.compute_seconds for step in window_W)
    layers = [chosen for step in window_W for chosen in step.choices]
    for num_slots, transfer_seconds in tiers:
        num_transfers = count_least_misses(layers, num_slots)
        seconds = max(seconds, num_transfers * transfer_seconds)
    return seconds


def count_least_misses(layers: LayerChoices, num_slots: int) -> int:
    """Returns the fewest transfers with which a cache of `num_slots` experts serves the layers.

    A layer's experts may be computed one after another in any order, and an expert need not be
    kept after its computation; keeping those of the next uses is then best (Belady).

    Args:
        layers: The experts of each layer.
        num_slots: Experts that the cache holds; it begins with those that are best for it.
    """
    next_use = _find_next_uses(layers)
    resident: dict[Expert, float] = {}
    """Resident experts with their next use."""
    latest: list[tuple[float, Expert]] = []
    """Heap of (minus the next use, expert); items that are not up to date are skipped."""
    num_misses = 0
    for chosen, uses in zip(layers, next_use, strict=True):
        for expert, use in zip(chosen, uses, strict=True):
            num_misses += expert not in resident
            resident[expert] = use
            heapq.heappush(latest, (-use, expert))
        while len(resident) > num_slots:
            use, expert = heapq.heappop(latest)
            if resident.get(expert) == -use:
                del resident[expert]
    # The best content is what the first misses fetch into the free slots of an empty cache.
    return max(0, num_misses - num_slots)


def _find_next_uses(layers: LayerChoices) -> list[list[float]]:
    """Returns, for each choice, the index of the next layer that chooses the expert again."""
    upcoming: dict[Expert, int] = {}
    next_use: list[list[float]] = []
    for index in range(len(layers) - 1, -1, -1):
        next_use.append([upcoming.get(expert, math.inf) for expert in layers[index]])
        upcoming.update(dict.fromkeys(layers[index], index))
    return next_use[::-1]
