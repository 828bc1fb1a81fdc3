"""Context of the replays: the reference model's held-out steps and forecasts, folded to a shape.

A paper's model has other numbers of experts than the reference model, whose routing is folded:
expert e of E becomes expert `e * E' // E` of the shape's E', and a token keeps the first top_k'
distinct ones of its choices, in the router's order; forecasts are folded likewise. Where the shape
has more experts or a larger top_k than the reference model, the reference model's stand.

Shape suffixes: T tokens of the step, E experts, K top_k, N folded experts, L layers.
"""

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.papers.cells import CellResult, PaperCell, StepTotals, total_step
from collect.traces import Trace, TraceSignal
from predictors.base import Ints, Signal
from predictors.errors import MoecastError
from predictors.spec import ModelSpec
from runtime import presets
from runtime.config import ShapeConfig
from runtime.policy.device_cache import count_tokens
from runtime.sim.hardware import RooflineHardware, describe_hardware
from runtime.sim.lower_bound import TimeBound, bound_time
from runtime.sim.replay import ReplayStats, replay
from runtime.sim.simulator import make_simulator
from runtime.sim.step import ArrayStep, BatchedStep, RecordedStep, first_request
from train.evaluate.forecasts import (
    RecordedForecast,
    RecordedForecasts,
    record_forecasts,
    routing_only,
)
from train.evaluate.variants import FoundPredictor


@dataclass(frozen=True)
class ReplayedRequests:
    """The number of requests of each replay."""

    measured: int
    """Held-out requests; batches are filled up if the trace has more."""
    warm: int
    """Training requests that run first, or as many batches: no figure includes them, for they find
    an empty arena."""


load_hardware = cache(presets.load_hardware)
load_shape = cache(presets.load_shape)
load_system = cache(presets.load_system)
"""Presets, each read once; they are not to be changed."""


def describe_model(shape: ShapeConfig, *, dtype: str = "float32") -> ModelSpec:
    """Returns the specification of a model of this shape, without a revision."""
    return ModelSpec(
        model_id=shape.name,
        revision="",
        config_hash="",
        num_layers=shape.num_layers,
        num_experts=shape.num_experts,
        top_k=shape.top_k,
        hidden_size=shape.hidden_size,
        dtype=dtype,
    )


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
        is_new_TK = np.ones(groups_TK.shape, dtype=bool)
        for k in range(1, groups_TK.shape[1]):
            is_new_TK[:, k] = (groups_TK[:, :k] != groups_TK[:, k : k + 1]).all(axis=1)
        order_TK = np.argsort(~is_new_TK, axis=1, kind="stable")[:, : self.top_k]
        is_new_TK = np.take_along_axis(is_new_TK, order_TK, axis=1)
        return np.where(
            is_new_TK, np.take_along_axis(groups_TK, order_TK, axis=1), groups_TK[:, :1]
        )

    def fold_step(self, step: ArrayStep) -> ArrayStep:
        experts_LTK = np.stack(
            [self.fold_experts(step.experts(layer)) for layer in range(len(step.experts_LTK))]
        )
        return ArrayStep(step.tokens_T, step.requests_T, experts_LTK)

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
        return replace(recorded, steps=steps)


def split_requests(trace: Trace, split: str) -> list[list[RecordedStep]]:
    """Returns the steps of each request of a split that generated tokens, its prefill first."""
    every: Iterable[RecordedStep] = trace.steps(split)
    requests = [list(steps) for _, steps in itertools.groupby(every, first_request)]
    return [steps for steps in requests if len(steps) > 1 and len(steps[0].tokens_T) > 1]


def combine_requests(
    requests: Sequence[Sequence[RecordedStep]], cell: PaperCell
) -> Iterator[RecordedStep]:
    """Yields the steps of requests that are served together, as the cell says.

    Their prompts are one step; then each request that has more tokens decodes one in each step.
    """
    for together in itertools.zip_longest(*requests):
        steps = [step for step in together if step is not None]
        yield steps[0] if cell.batch == 1 else BatchedStep(steps)


def count_batches(num_requests: int, batch: int) -> int:
    return -(-num_requests // batch)


class PaperContext:
    """Steps and forecasts of a trace, each computed once for all replays that need them.

    Args:
        trace: Folder of the trace.
        requests: The number of requests to replay.
        predictors: Predictors of the replays by key.
    """

    def __init__(
        self,
        trace: Path,
        *,
        requests: ReplayedRequests,
        predictors: Mapping[str, FoundPredictor],
    ):
        # The command has verified the trace.
        self.trace = Trace.open(trace, verify=False)
        self.requests = requests
        self._predictors = predictors
        self._steps: dict[Any, list[RecordedStep]] = {}
        self._recorded: dict[Any, RecordedForecasts] = {}
        self._folded: dict[Any, Any] = {}
        self._bounds: dict[Any, TimeBound] = {}

    def steps(self, cell: PaperCell) -> list[RecordedStep]:
        """Returns the warm-up's steps and then the held-out ones, hidden states included."""
        key = grouping(cell)
        if key not in self._steps:
            self._steps = {
                key: [
                    step
                    for split, number in (
                        ("train", self.requests.warm),
                        ("held_out", self.requests.measured),
                    )
                    for step in self._combine(split, number, cell)
                ]
            }
        return self._steps[key]

    def _combine(self, split: str, number: int, cell: PaperCell) -> Iterator[RecordedStep]:
        requests = split_requests(self.trace, split)
        if len(requests) < number:
            raise MoecastError(
                f"the trace {self.trace.path} has {len(requests)} {split} requests with generated "
                f"tokens, {number} are needed: collect more (data.num_prompts=...), or take fewer "
                "(requests=...)"
            )
        end = min(len(requests), count_batches(number, cell.batch) * cell.batch)
        for begin in range(0, end, cell.batch):
            yield from combine_requests(requests[begin : min(end, begin + cell.batch)], cell)

    def forecasts(self, cell: PaperCell, predictor: str) -> RecordedForecasts:
        key = (predictor, grouping(cell))
        if key not in self._recorded:
            made = self._predictors[predictor].load(self.trace.spec)
            self._recorded = {key: record_forecasts(made, self.steps(cell))}
        return self._recorded[key]

    def folded_steps(self, fold: ExpertFold, cell: PaperCell) -> list[RecordedStep]:
        key = ("steps", fold, grouping(cell))
        if key not in self._folded:
            layers = self.trace.spec.num_layers
            self._folded[key] = [
                fold.fold_step(routing_only(step, layers)) for step in self.steps(cell)
            ]
        return self._folded[key]

    def folded_forecasts(
        self, fold: ExpertFold, cell: PaperCell, predictor: str
    ) -> RecordedForecasts:
        """Returns the folded forecasts; only the last ones are kept, which take much memory."""
        key = (predictor, fold, grouping(cell), cell.only_first_forecast)
        if self._folded.get("forecasts key") != key:
            folded = fold.fold_forecasts(self.forecasts(cell, predictor))
            if cell.only_first_forecast:
                folded = keep_first_forecasts(folded)
            self._folded |= {"forecasts key": key, "forecasts": folded}
        return self._folded["forecasts"]

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

    def run(self, cell: PaperCell, predictor: str | None) -> CellResult:
        """Replays a cell; `predictor` is the key of its predictor."""
        system = cell.system
        fold = self.fold(cell.shape)
        spec = self.spec(fold)
        slots = max(spec.top_k + 1, int(cell.share * spec.num_layers * spec.num_experts))
        slots = min(slots, spec.num_layers * spec.num_experts)
        if system.eviction == "static":
            options = {**system.eviction_options, "counts": self.counts(fold)}
            system = replace(system, eviction_options=options)
        hardware = describe_hardware(cell.hardware, cell.shape)
        steps = self.folded_steps(fold, cell)
        replayed = None
        if predictor is not None:
            replayed = self.folded_forecasts(fold, cell, predictor).predictor(spec)
        totals: list[StepTotals] = []
        stats = replay(
            steps,
            replayed,
            spec=spec,
            system=system,
            hardware=hardware,
            budget_slots=slots,
            make_machine=make_simulator
            if cell.interconnect is None
            else cell.interconnect.make_machine,
            on_step=lambda *step: totals.append(total_step(*step)),
        )
        share = None
        if cell.interconnect is None:
            share = self._check_bound(cell, stats, hardware, slots)
        ranked = []
        if cell.measures_accuracy:
            assert predictor is not None, cell
            ranked = count_ranked(steps, self.folded_forecasts(fold, cell, predictor), spec)
        return CellResult.of_replay(
            totals,
            slots=slots,
            warm_units=count_batches(self.requests.warm, cell.batch),
            ranked=ranked,
            share_of_least_time=share,
        )

    def _check_bound(
        self, cell: PaperCell, stats: ReplayStats, hardware: RooflineHardware, slots: int
    ) -> float:
        """Returns the least time of the run over its time, which it may not beat."""
        fold = self.fold(cell.shape)
        key = (repr(hardware), fold, grouping(cell), slots)
        if key not in self._bounds:
            self._bounds[key] = bound_time(
                self.folded_steps(fold, cell),
                spec=self.spec(fold),
                hardware=hardware,
                num_slots=slots,
            )
        bound = self._bounds[key]
        bound.assert_holds(stats)
        return (bound.decode_seconds + bound.prefill_seconds) / stats.total_seconds


def grouping(cell: PaperCell) -> tuple[object, ...]:
    """Returns the fields of a cell that decide its steps."""
    return cell.batch, cell.drawn


def count_ranked(
    steps: Sequence[RecordedStep], recorded: RecordedForecasts, spec: ModelSpec
) -> list[tuple[int, int]]:
    """Returns, for each step, the experts that forecasts rank first, and the correct ones of them.

    A layer's last forecast counts, with as many experts as a token chooses. In batches they are
    compared with as many that most tokens are routed to (Klotski, section 9.6). Layers that are
    never forecast count as wrong (ProMoE, section 4.1).
    """
    counts = []
    for step, answers in zip(steps, recorded.steps, strict=True):
        latest = {
            forecast.layer: forecast for forecasts in answers.values() for forecast in forecasts
        }
        num_correct = 0
        for layer, forecast in latest.items():
            tokens_per_expert = count_tokens(step.experts(layer), spec.num_experts)
            hot = sorted(tokens_per_expert, key=lambda e: -tokens_per_expert[e])[: spec.top_k]
            num_correct += len(set(hot).intersection(forecast.experts(spec.top_k)[: spec.top_k]))
        counts.append((spec.top_k * spec.num_layers, num_correct))
    return counts


def keep_first_forecasts(recorded: RecordedForecasts) -> RecordedForecasts:
    """Returns only what is forecast when the first layer has been routed."""
    event = (Signal.ROUTED, 0)
    steps = [{event: step[event]} if event in step else {} for step in recorded.steps]
    return replace(recorded, steps=steps)


def with_bits_per_weight(shape: ShapeConfig, bits: int) -> ShapeConfig:
    """Returns the shape with all weights in that many bits."""
    factor = bits / 8 / shape.bytes_per_weight
    return replace(
        shape,
        name=f"{shape.name}, {bits} bits",
        expert_bytes=int(shape.expert_bytes * factor),
        layer_bytes=int(shape.layer_bytes * factor),
        bytes_per_weight=bits / 8,
    )


def experts_bytes(shape: ShapeConfig) -> int:
    """Returns the size of all experts of a shape."""
    return shape.num_layers * shape.num_experts * shape.expert_bytes
