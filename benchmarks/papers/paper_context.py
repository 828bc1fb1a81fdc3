"""Context of the replays: the reference model's held-out steps and forecasts, folded to a shape.

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

from benchmarks.papers.claims import ReplayCell, mean
from collect.traces import Trace, TraceSignal
from configs.compose import compose_typed
from predictors.base import Ints
from predictors.spec import ModelSpec
from runtime.config import ORACLE, HardwareConfig, ModelConfig, ShapeConfig, SystemConfig
from runtime.policy.counters import sum_counters
from runtime.sim.cluster import Interconnect
from runtime.sim.hardware import describe_hardware
from runtime.sim.replay import replay
from runtime.sim.step import BatchedStep, first_request
from train.evaluate.forecasts import (
    RecordedForecast,
    RecordedForecasts,
    RoutedStep,
    held_out_steps,
    record_forecasts,
    routing_only,
)
from train.evaluate.sources import PredictorSources
from train.replay import is_decode

GROUPED = 45
"""Held-out requests with generated tokens, for the replays of groups."""


@cache
def load_hardware(name: str) -> HardwareConfig:
    """Reads `configs/hardware/NAME.yaml`."""
    config, _ = compose_typed("evaluate", [f"hardware={name}"])
    return config.hardware[0]


@cache
def load_shape(name: str) -> ShapeConfig:
    """Reads `configs/shape/NAME.yaml`."""
    config, _ = compose_typed("evaluate", [f"shape={name}"])
    return config.shape


@dataclass(frozen=True)
class ExpertFold:
    """Mapping of the traced model's experts to a shape's fewer experts."""

    num_from: int
    num_to: int
    top_k: int

    @cached_property
    def groups_E(self) -> Ints:
        return np.arange(self.num_from) * self.num_to // self.num_from

    def fold_experts(self, experts_TK: Ints) -> Ints:
        """Returns `[T, top_k]`, each token's first distinct groups.

        A token with too few distinct groups has its first one twice.
        """
        groups_TK = self.groups_E[experts_TK]
        kept = np.empty((len(groups_TK), self.top_k), dtype=np.int64)
        for row, groups_K in enumerate(groups_TK.tolist()):
            distinct = list(dict.fromkeys(groups_K))[: self.top_k]
            kept[row] = distinct + distinct[:1] * (self.top_k - len(distinct))
        return kept

    def fold_step(self, step: RoutedStep) -> RoutedStep:
        experts_LTK = np.stack([self.fold_experts(layer) for layer in step.experts_LTK])
        return RoutedStep(step.tokens_T, step.requests_T, experts_LTK)

    def fold_forecast(self, forecast: RecordedForecast, *, most: int | None) -> RecordedForecast:
        """Folds a forecast; a group's probability is that of any of its experts, as independent.

        Args:
            most: experts of `wanted` to keep, if the predictor counts them by top_k.
        """
        starts_N = np.searchsorted(self.groups_E, np.arange(self.num_to))
        none_TN = np.multiply.reduceat(1.0 - forecast.scores_TE, starts_N, axis=1)
        wanted = forecast.wanted
        if wanted is not None:
            wanted = list(dict.fromkeys(self.groups_E[list(wanted)].tolist()))[:most]
        priority_E = forecast.priority_E
        if priority_E is not None:
            priority_E = np.maximum.reduceat(priority_E, starts_N)
        return RecordedForecast(
            forecast.layer, (1.0 - none_TN).astype(np.float32), wanted, priority_E
        )

    def fold_forecasts(self, recorded: RecordedForecasts) -> RecordedForecasts:
        most = self.top_k if recorded.kind == "correlation" else None
        steps = [
            {
                event: [self.fold_forecast(forecast, most=most) for forecast in forecasts]
                for event, forecasts in step.items()
            }
            for step in recorded.steps
        ]
        return RecordedForecasts(recorded.kind, recorded.signals, steps)


def group_requests(trace: Trace, size: int) -> Iterator[BatchedStep]:
    """Yields the steps of the first `GROUPED` held-out requests, served `size` at a time.

    Their prompts are one step; then each request that has more tokens decodes one in each step.
    """
    requests = [
        list(steps) for _, steps in itertools.groupby(trace.steps("held_out"), first_request)
    ]
    kept = [steps for steps in requests if len(steps) > 1 and len(steps[1].tokens_T) == 1]
    for begin in range(0, len(kept[:GROUPED]), size):
        for together in itertools.zip_longest(*kept[:GROUPED][begin : begin + size]):
            yield BatchedStep([step for step in together if step is not None])


def count_generated(steps: Sequence[RoutedStep]) -> int:
    """Returns the number of tokens of decode steps."""
    return sum(len(step.tokens_T) for step in steps if is_decode(step))


class PaperContext:
    """Steps and forecasts of a trace, each computed once for all claims that need them."""

    def __init__(self, trace: Path, *, entries: Path | None, new_tokens: int):
        self.trace = Trace.open(trace)
        self.new_tokens = new_tokens
        self._sources = PredictorSources(self.trace, model=ModelConfig(), entries=entries, seed=0)
        self._steps: dict[int, list[Any]] = {}
        self._recorded: dict[tuple[str, int], RecordedForecasts] = {}
        self._folded: dict[tuple[Any, ...], Any] = {}

    def steps(self, batch: int) -> list[Any]:
        """Returns the trace's held-out steps, hidden states included."""
        if batch not in self._steps:
            self._steps[batch] = (
                held_out_steps(self.trace, batch=1, new_tokens=self.new_tokens)
                if batch == 1
                else list(group_requests(self.trace, batch))
            )
        return self._steps[batch]

    def forecasts(
        self, kind: str, options: Mapping[str, Any], batch: int
    ) -> tuple[str, RecordedForecasts]:
        key = self._sources.find(kind, options)
        if (key, batch) not in self._recorded:
            source = self._sources.found[key]
            self._recorded[key, batch] = record_forecasts(
                source.load(self.trace.spec), self.steps(batch)
            )
        return key, self._recorded[key, batch]

    def folded_steps(self, fold: ExpertFold, batch: int) -> list[RoutedStep]:
        key = ("steps", fold, batch)
        if key not in self._folded:
            layers = self.trace.spec.num_layers
            self._folded[key] = [
                fold.fold_step(routing_only(step, layers)) for step in self.steps(batch)
            ]
        return self._folded[key]

    def folded_forecasts(
        self, fold: ExpertFold, kind: str, options: Mapping[str, Any], batch: int
    ) -> RecordedForecasts:
        name, recorded = self.forecasts(kind, options, batch)
        key = (name, fold, batch)
        if key not in self._folded:
            self._folded[key] = fold.fold_forecasts(recorded)
        return self._folded[key]

    def fold(self, shape: ShapeConfig) -> ExpertFold:
        spec = self.trace.spec
        num_experts = min(shape.num_experts, spec.num_experts)
        return ExpertFold(spec.num_experts, num_experts, min(shape.top_k, spec.top_k))

    def counts(self, fold: ExpertFold) -> list[list[int]]:
        """Returns `[L][N]`, the training tokens of each expert, for a static cache."""
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

    def spec(self, fold: ExpertFold) -> ModelSpec:
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
    ) -> ReplayCell:
        """Replays one system.

        Args:
            share: share of all experts that fit, on each device of an `interconnect`.
            batch: requests that are prefilled together and then decode together.
        """
        fold = self.fold(shape)
        spec = self.spec(fold)
        slots = max(spec.top_k + 1, int(share * spec.num_layers * spec.num_experts))
        predictor = None
        if system.prefetch and system.predictor not in (None, ORACLE):
            recorded = self.folded_forecasts(
                fold, system.predictor, system.predictor_options, batch
            )
            predictor = recorded.predictor(spec)
        if system.eviction == "static" and not system.eviction_options.get("first_layers"):
            options = {**system.eviction_options, "counts": self.counts(fold)}
            system = replace(system, eviction_options=options)
        steps = self.folded_steps(fold, batch)
        stats = replay(
            steps,
            predictor,
            spec=spec,
            system=system,
            hardware=describe_hardware(hardware, shape),
            budget_slots=min(slots, spec.num_layers * spec.num_experts),
            interconnect=interconnect,
        )
        decode, prefill = sum_counters(stats.decode), sum_counters(stats.prefill)
        decoding, prefilling = sum(stats.tpot_seconds), sum(stats.ttft_seconds)
        return ReplayCell(
            system=system.name,
            shape=shape.name,
            hardware=hardware.name,
            share=round(share, 4),
            slots=slots,
            batch=batch,
            tpot_seconds=decoding / len(stats.tpot_seconds),
            ttft_seconds=mean(stats.ttft_seconds[1:] or stats.ttft_seconds),
            hit_rate=decode.hit_rate,
            decode_stall_seconds=stats.decode_stall_seconds,
            decode_stall_share=stats.decode_stall_seconds / decoding,
            prefill_stall_share=(stats.stall_seconds - stats.decode_stall_seconds) / prefilling,
            decode_bytes=decode.bytes_moved,
            prefill_bytes=prefill.bytes_moved,
            tokens_per_second=count_generated(steps) / (decoding + prefilling),
        )


def experts_bytes(shape: ShapeConfig) -> int:
    """Returns the size of all experts of a shape."""
    return shape.num_layers * shape.num_experts * shape.expert_bytes
