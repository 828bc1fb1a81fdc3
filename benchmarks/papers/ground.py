"""What every claim is replayed on: the reference model's held-out steps, folded to a shape.

A paper's model has other numbers of experts than the reference model, whose routing is folded:
expert e of E becomes expert `e * E' // E` of the shape's E', and a token keeps the first top_k'
distinct ones of its choices, in the router's order; forecasts are folded likewise. Where the shape
has more experts or a larger top_k than the reference model, the reference model's stand.

Shape suffixes: T tokens of the step, E experts, K top_k, N folded experts, L layers.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np

from collect.traces import Trace, TraceSignal
from configs.compose import compose_typed
from predictors.base import Ints
from predictors.spec import ModelSpec
from runtime.config import ORACLE, HardwareConfig, ModelConfig, ShapeConfig, SystemConfig
from runtime.policy.counters import sum_counters
from runtime.sim.cluster import Interconnect
from runtime.sim.hardware import Hardware, described
from runtime.sim.replay import replay
from runtime.sim.step import BatchedStep, first_request
from train.evaluate.forecasts import RecordedForecast, RecordedForecasts, record_forecasts
from train.evaluate.sources import Sources
from train.evaluate.steps import Routed, held_out_steps, is_decode, routed

GROUPED = 45
"""Held-out requests that are served in groups: so many have generated tokens."""


def systems() -> dict[str, SystemConfig]:
    """Every `configs/system/*.yaml`, by name."""
    config, _ = compose_typed("evaluate", ["system=all"])
    return {one.name: one for one in config.system}


@cache
def machine(name: str) -> HardwareConfig:
    config, _ = compose_typed("evaluate", [f"hardware={name}"])
    return config.hardware[0]


@cache
def shape_named(name: str) -> ShapeConfig:
    config, _ = compose_typed("evaluate", [f"shape={name}"])
    return config.shape


@dataclass(frozen=True)
class Fold:
    """From the traced model's experts to a shape's."""

    num_from: int
    num_to: int
    top_k: int

    @cached_property
    def groups_E(self) -> Ints:
        return np.arange(self.num_from) * self.num_to // self.num_from

    def chosen(self, experts_TK: Ints) -> Ints:
        """`[T, top_k]`: each token's first distinct groups.

        A group stands twice where there are too few.
        """
        groups_TK = self.groups_E[experts_TK]
        kept = np.empty((len(groups_TK), self.top_k), dtype=np.int64)
        for row, groups_K in enumerate(groups_TK.tolist()):
            distinct = list(dict.fromkeys(groups_K))[: self.top_k]
            kept[row] = distinct + distinct[:1] * (self.top_k - len(distinct))
        return kept

    def step(self, step: Routed) -> Routed:
        experts_LTK = np.stack([self.chosen(layer) for layer in step.experts_LTK])
        return Routed(step.tokens_T, step.requests_T, experts_LTK)

    def forecast(self, told: RecordedForecast, *, most: int | None) -> RecordedForecast:
        """The chance of a group is that of any of its experts, taken as independent.

        Args:
            most: experts of `wanted` to keep, where the predictor counts them by top_k.
        """
        starts_N = np.searchsorted(self.groups_E, np.arange(self.num_to))
        none_TN = np.multiply.reduceat(1.0 - told.scores_TE, starts_N, axis=1)
        wanted = told.wanted
        if wanted is not None:
            wanted = list(dict.fromkeys(self.groups_E[list(wanted)].tolist()))[:most]
        priority_E = told.priority_E
        if priority_E is not None:
            priority_E = np.maximum.reduceat(priority_E, starts_N)
        return RecordedForecast(told.layer, (1.0 - none_TN).astype(np.float32), wanted, priority_E)

    def tape(self, tape: RecordedForecasts) -> RecordedForecasts:
        most = self.top_k if tape.kind == "correlation" else None
        steps = [
            {event: [self.forecast(one, most=most) for one in told] for event, told in step.items()}
            for step in tape.steps
        ]
        return RecordedForecasts(tape.kind, tape.signals, steps)


def in_groups(trace: Trace, size: int) -> Iterator[BatchedStep]:
    """The first `GROUPED` held-out requests, `size` at a time: their prompts in one step, then one
    token of each that has more, until none has.
    """
    requests = [list(one) for _, one in itertools.groupby(trace.steps("held_out"), first_request)]
    kept = [one for one in requests if len(one) > 1 and len(one[1].tokens_T) == 1][:GROUPED]
    for begin in range(0, len(kept), size):
        for step in itertools.zip_longest(*kept[begin : begin + size]):
            yield BatchedStep([one for one in step if one is not None])


def generated(steps: Sequence[Routed]) -> int:
    """Tokens of decode steps."""
    return sum(len(step.tokens_T) for step in steps if is_decode(step))


class Ground:
    """Steps and forecasts, each made once for every claim that needs them."""

    def __init__(self, trace: Path, *, entries: Path | None, new_tokens: int):
        self.trace = Trace.open(trace)
        self.systems = systems()
        self.new_tokens = new_tokens
        self._sources = Sources(self.trace, model=ModelConfig(), entries=entries, seed=0)
        self._steps: dict[int, list[Any]] = {}
        self._tapes: dict[tuple[str, int], RecordedForecasts] = {}
        self._folded: dict[tuple[Any, ...], Any] = {}

    def steps(self, batch: int) -> list[Any]:
        """As the trace has them, hidden states included."""
        if batch not in self._steps:
            self._steps[batch] = (
                held_out_steps(self.trace, batch=1, new_tokens=self.new_tokens)
                if batch == 1
                else list(in_groups(self.trace, batch))
            )
        return self._steps[batch]

    def tape(
        self, kind: str, options: Mapping[str, Any], batch: int
    ) -> tuple[str, RecordedForecasts]:
        key = self._sources.find(kind, options)
        if (key, batch) not in self._tapes:
            source = self._sources.found[key]
            self._tapes[key, batch] = record_forecasts(
                source.make(self.trace.spec), self.steps(batch)
            )
        return key, self._tapes[key, batch]

    def folded_steps(self, fold: Fold, batch: int) -> list[Routed]:
        key = ("steps", fold, batch)
        if key not in self._folded:
            layers = self.trace.spec.num_layers
            self._folded[key] = [fold.step(routed(step, layers)) for step in self.steps(batch)]
        return self._folded[key]

    def folded_tape(
        self, fold: Fold, kind: str, options: Mapping[str, Any], batch: int
    ) -> RecordedForecasts:
        name, tape = self.tape(kind, options, batch)
        key = (name, fold, batch)
        if key not in self._folded:
            self._folded[key] = fold.tape(tape)
        return self._folded[key]

    def fold(self, shape: ShapeConfig) -> Fold:
        spec = self.trace.spec
        num_experts = min(shape.num_experts, spec.num_experts)
        return Fold(spec.num_experts, num_experts, min(shape.top_k, spec.top_k))

    def counts(self, fold: Fold) -> list[list[int]]:
        """`[L][N]`: how many training tokens each expert had: what a static cache holds."""
        key = ("counts", fold)
        if key not in self._folded:
            rows = self.trace.rows("train")
            columns = (
                self.trace.column(TraceSignal.EXPERTS, layer)[rows]
                for layer in range(self.trace.spec.num_layers)
            )
            self._folded[key] = [
                np.bincount(fold.groups_E[experts].reshape(-1), minlength=fold.num_to).tolist()
                for experts in columns
            ]
        return self._folded[key]

    def spec(self, fold: Fold) -> ModelSpec:
        return replace(self.trace.spec, num_experts=fold.num_to, top_k=fold.top_k)

    def run(
        self,
        system: SystemConfig,
        shape: ShapeConfig,
        hardware: HardwareConfig,
        *,
        share: float,
        batch: int = 1,
        interconnect: Interconnect | None = None,
    ) -> dict[str, Any]:
        """One replay; `share` of all experts fit (on each device of an `interconnect`).

        Times in seconds, of the reference model's number of layers; the first prefill finds an
        empty arena and is left out of `ttft_seconds`.

        `batch` requests are prefilled together and then decode together, where it is above 1.
        """
        fold = self.fold(shape)
        spec = self.spec(fold)
        slots = max(spec.top_k + 1, int(share * spec.num_layers * spec.num_experts))
        predictor = None
        if system.prefetch and system.predictor not in (None, ORACLE):
            tape = self.folded_tape(fold, system.predictor, system.predictor_options, batch)
            predictor = tape.predictor(spec)
        if system.eviction == "static" and not system.eviction_options.get("first_layers"):
            options = {**system.eviction_options, "counts": self.counts(fold)}
            system = replace(system, eviction_options=options)
        steps = self.folded_steps(fold, batch)
        described_as: Hardware = described(hardware, shape)
        stats = replay(
            steps,
            predictor,
            spec=spec,
            system=system,
            hardware=described_as,
            budget_slots=min(slots, spec.num_layers * spec.num_experts),
            interconnect=interconnect,
        )
        decode, prefill = sum_counters(stats.decode), sum_counters(stats.prefill)
        decoding, prefilling = sum(stats.tpot_seconds), sum(stats.ttft_seconds)
        return {
            "system": system.name,
            "shape": shape.name,
            "hardware": hardware.name,
            "share": round(share, 4),
            "slots": slots,
            "batch": batch,
            "tpot_seconds": decoding / len(stats.tpot_seconds),
            "ttft_seconds": mean(stats.ttft_seconds[1:] or stats.ttft_seconds),
            "hit_rate": decode.hit_rate,
            "decode_stall_seconds": stats.decode_stall_seconds,
            "decode_stall_share": stats.decode_stall_seconds / decoding,
            "prefill_stall_share": (stats.stall_seconds - stats.decode_stall_seconds) / prefilling,
            "decode_bytes": decode.bytes_moved,
            "prefill_bytes": prefill.bytes_moved,
            "tokens_per_second": generated(steps) / (decoding + prefilling),
        }


def mean(values: Sequence[float]) -> float:
    return float(np.mean(values))


def experts_bytes(shape: ShapeConfig) -> int:
    return shape.num_layers * shape.num_experts * shape.expert_bytes
