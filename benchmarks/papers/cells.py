"""Replays that the papers' figures need, and what is measured in each.

Shape suffixes: U units of a replay, B bootstrap samples.
"""

import hashlib
import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Generic, NamedTuple, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from benchmarks.cluster import Interconnect
from predictors.spec import ModelSpec
from runtime.config import HardwareConfig, ShapeConfig, SystemConfig
from runtime.sim.replay import ReplayStats
from runtime.sim.step import RecordedStep

Figure = float | NDArray[np.float64]
"""A number, or `[B]`: its values under bootstrap resampling."""

NUM_SAMPLES = 1000
"""Bootstrap samples of a confidence interval."""

UNNAMED = ("name", "source")
"""Fields that decide no figure."""


@dataclass(frozen=True, kw_only=True)
class DrawnGroups:
    """Groups of micro-batches with Klotski's lengths of prompts and answers, one after another."""

    environment: str
    """Its machine and model (`benchmarks.klotski.environments`)."""
    n: int
    """Micro-batches of a group."""
    groups: int
    merges_experts: bool
    """Compute an expert once for all micro-batches of a group."""
    weight_ratio: float = 1.0
    """Size of stored weights / size of 16-bit ones."""


@dataclass(frozen=True, kw_only=True)
class PaperCell:
    """A system on a machine with a share of a model's experts."""

    system: SystemConfig
    shape: ShapeConfig
    hardware: HardwareConfig
    share: float
    """Share of all experts that fit, on each device of an `interconnect`."""
    batch: int = 1
    """Requests that are prefilled together and then decode together."""
    drawn: DrawnGroups | None = None
    """Requests drawn from the held-out ones; None: these, one after another."""
    interconnect: Interconnect | None = None
    measures_accuracy: bool = False
    """Compare the experts that the predictor ranks first with those that routers choose or, in
    batches, with as many that most tokens are routed to (Klotski, section 9.6)."""
    only_first_forecast: bool = False
    """Use only what is forecast when the step's first layer has been routed."""

    def digest(self, *others: str) -> str:
        """Returns the sha256 of everything that decides the figures, as hex.

        `others` identify the requests, the forecasts and the code.
        """
        settings: dict[str, Any] = asdict(self)
        for part in ("system", "shape", "hardware"):
            for name in UNNAMED:
                settings[part].pop(name, None)
        text = json.dumps([settings, *others], sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()


Values = TypeVar("Values")


@dataclass(frozen=True, kw_only=True)
class ReplaySums(Generic[Values]):
    prefills: Values
    prefill_seconds: Values
    prefill_stall_seconds: Values
    decode_steps: Values
    decode_tokens: Values
    decode_seconds: Values
    decode_stall_seconds: Values
    decode_bytes: Values
    requests: Values
    hits: Values
    predicted: Values
    needed_predicted: Values
    ranked: Values
    """Experts that the predictor ranked first, as many as each token chooses; 0: not measured."""
    ranked_correctly: Values
    """Those of them that routers chose."""


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
    decode_bytes: int
    requests: int
    """Requested experts of decode steps, as the next three."""
    hits: int
    predicted: int
    needed_predicted: int


def total_step(stats: ReplayStats, step: RecordedStep) -> StepTotals:
    """Returns the totals after a step of a replay."""
    num_tokens = len(step.tokens_T)
    is_prefill = num_tokens > len(set(step.requests_T.tolist()))
    decode_bytes = requests = hits = predicted = needed_predicted = 0
    for layer in stats.decode:
        decode_bytes += layer.bytes_moved
        requests += layer.requests
        hits += layer.hits
        predicted += layer.predicted
        needed_predicted += layer.needed_predicted
    return StepTotals(
        is_prefill=is_prefill,
        num_tokens=num_tokens,
        seconds=(stats.ttft_seconds if is_prefill else stats.tpot_seconds)[-1],
        prefill_stall_seconds=stats.stall_seconds - stats.decode_stall_seconds,
        decode_stall_seconds=stats.decode_stall_seconds,
        decode_bytes=decode_bytes,
        requests=requests,
        hits=hits,
        predicted=predicted,
        needed_predicted=needed_predicted,
    )


class UnitSums(ReplaySums[list[float]]):
    """Sums over each unit of a replay, `[U]`: a prompt, or a batch of them, and what follows it."""

    @classmethod
    def of_replay(
        cls,
        steps: Sequence[StepTotals],
        *,
        warm_units: int,
        ranked: Sequence[tuple[int, int]] = (),
    ) -> Self:
        """Divides a replay at its prefills; the first `warm_units` units are left out.

        Args:
            steps: The totals after each step of the replay.
            warm_units: Units before the measured ones.
            ranked: Experts that the predictor ranked first in each step, all and the correct ones;
                empty: not measured.
        """
        rows: list[dict[str, float]] = []
        before: Mapping[str, float] = {}
        for place, totals in enumerate(steps):
            if totals.is_prefill:
                rows.append(dict.fromkeys((field.name for field in fields(cls)), 0.0))
            row, now = rows[-1], totals._asdict()
            phase = "prefill" if totals.is_prefill else "decode"
            row[f"{phase}_seconds"] += totals.seconds
            row["prefills" if totals.is_prefill else "decode_steps"] += 1
            row["decode_tokens"] += 0 if totals.is_prefill else totals.num_tokens
            for name in row:
                if name in now:
                    row[name] += now[name] - before.get(name, 0)
            before = now
            if ranked and not totals.is_prefill:
                row["ranked"] += ranked[place][0]
                row["ranked_correctly"] += ranked[place][1]
        rows = rows[warm_units:]
        return cls(**{name: [row[name] for row in rows] for name in rows[0]})

    def sum(self) -> "CellFigures":
        return CellFigures(**{name: float(np.sum(values)) for name, values in vars(self).items()})

    def resample(self) -> "CellFigures":
        """Returns the sums of `NUM_SAMPLES` samples of units, drawn with replacement.

        The samples depend on the number of units alone, so that those of two replays of the same
        requests are paired.
        """
        num_units = len(self.prefills)
        rng = np.random.default_rng(num_units)
        counts_BU = rng.multinomial(num_units, np.full(num_units, 1 / num_units), NUM_SAMPLES)
        return CellFigures(
            **{name: counts_BU @ np.asarray(values) for name, values in vars(self).items()}
        )


class CellFigures(ReplaySums[Figure]):
    """Figures of a replay, from its sums: numbers, or one value for each bootstrap sample."""

    @property
    def ttft_seconds(self) -> Figure:
        """Mean time of a prefill."""
        return self.prefill_seconds / self.prefills

    @property
    def tpot_seconds(self) -> Figure:
        """Mean time of a decode step."""
        return self.decode_seconds / self.decode_steps

    @property
    def hit_rate(self) -> Figure:
        """Share of the experts requested in decode steps that were resident."""
        return self.hits / self.requests

    @property
    def decode_stall_share(self) -> Figure:
        return self.decode_stall_seconds / self.decode_seconds

    @property
    def prefill_stall_share(self) -> Figure:
        return self.prefill_stall_seconds / self.prefill_seconds

    @property
    def tokens_per_second(self) -> Figure:
        """Generated tokens over the time of prefills and decode steps."""
        return self.decode_tokens / (self.decode_seconds + self.prefill_seconds)

    @property
    def precision(self) -> Figure:
        """Share of predicted experts that were needed."""
        return self.needed_predicted / self.predicted

    @property
    def accuracy(self) -> Figure:
        """Share of the experts that the predictor ranked first in decode steps that were chosen."""
        return self.ranked_correctly / self.ranked


ONES = CellFigures(**{field.name: 1.0 for field in fields(CellFigures)})
"""Figures of a replay that has not run."""


@dataclass(frozen=True, kw_only=True)
class CellResult:
    """A finished replay, as its file holds it. Times in seconds, of the traced number of layers."""

    units: UnitSums
    slots: int
    ttft_median: float
    ttft_p95: float
    tpot_median: float
    tpot_p95: float
    share_of_least_time: float | None
    """Least time of this machine / time of all steps; None with several devices."""

    @classmethod
    def of_replay(
        cls,
        totals: Sequence[StepTotals],
        *,
        slots: int,
        warm_units: int,
        ranked: Sequence[tuple[int, int]],
        share_of_least_time: float | None,
    ) -> Self:
        """Returns the figures without the first `warm_units` units."""
        first = [place for place, step in enumerate(totals) if step.is_prefill][warm_units]
        ttft, tpot = (
            [step.seconds for step in totals[first:] if step.is_prefill is phase]
            for phase in (True, False)
        )
        return cls(
            units=UnitSums.of_replay(totals, warm_units=warm_units, ranked=ranked),
            slots=slots,
            ttft_median=float(np.percentile(ttft, 50)),
            ttft_p95=float(np.percentile(ttft, 95)),
            tpot_median=float(np.percentile(tpot, 50)),
            tpot_p95=float(np.percentile(tpot, 95)),
            share_of_least_time=share_of_least_time,
        )

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> Self:
        return cls(**{**document, "units": UnitSums(**document["units"])})


class ReplayTable:
    """Figures of replays that the comparisons ask for.

    Args:
        spec: The traced model.
        figures: Sums, or resampled sums, by the digest without others of the cell; None: before the
            replays, when all are 1.
    """

    def __init__(self, spec: ModelSpec, figures: Mapping[str, CellFigures] | None = None):
        self.spec = spec
        self._figures = figures
        self.asked: list[PaperCell] = []
        """Replays in the order in which they were asked for."""

    def replay(
        self,
        system: SystemConfig,
        shape: ShapeConfig,
        hardware: HardwareConfig,
        *,
        share: float,
        batch: int = 1,
        **options: Any,
    ) -> CellFigures:
        """Returns the figures of a replay; `options` are other fields of `PaperCell`."""
        cell = PaperCell(
            system=system, shape=shape, hardware=hardware, share=share, batch=batch, **options
        )
        self.asked.append(cell)
        return self.find(cell)

    def replay_all(
        self,
        systems: Mapping[str, SystemConfig],
        shapes: Iterable[ShapeConfig],
        hardware: HardwareConfig,
        *,
        shares: Sequence[float],
        batches: Sequence[int] = (1,),
    ) -> dict[str, list[CellFigures]]:
        """Returns the figures of each system, as it is named here, with every shape and batch.

        Args:
            shares: Shares of the experts that fit, each with all of them.
        """
        places = list(itertools.product(shapes, shares, batches))
        return {
            name: [
                self.replay(replace(system, name=name), shape, hardware, share=share, batch=batch)
                for shape, share, batch in places
            ]
            for name, system in systems.items()
        }

    def find(self, cell: PaperCell) -> CellFigures:
        return ONES if self._figures is None else self._figures[cell.digest()]

    def describe_basis(self, shapes: Sequence[ShapeConfig]) -> str:
        """Returns how many shapes and how many different routings a mean is of.

        Shapes with the same number of experts and top_k as replayed have the same routing: they
        differ in bytes and computation only.
        """
        routings = {
            (min(shape.num_experts, self.spec.num_experts), min(shape.top_k, self.spec.top_k))
            for shape in shapes
        }
        if len(routings) == 1:
            return f"{len(shapes)} shapes, one routing"
        sizes = ", ".join(f"{top_k} of {experts}" for experts, top_k in sorted(routings))
        return f"{len(shapes)} shapes, one routing folded to {sizes}"


def mean(values: Iterable[Figure]) -> Any:
    """Returns the mean of numbers, or of the values of each bootstrap sample."""
    return np.mean(np.stack([np.asarray(value) for value in values]), axis=0)[()]


def maximum(values: Iterable[Figure]) -> Any:
    return np.max(np.stack([np.asarray(value) for value in values]), axis=0)[()]


def ratios(cells: Sequence[CellFigures], base: Sequence[CellFigures], key: str) -> list[Figure]:
    """Returns `base / cell` of a figure for each pair: how many times faster the cell is."""
    return [getattr(b, key) / getattr(c, key) for c, b in zip(cells, base, strict=True)]


def mean_ratio(cells: Sequence[CellFigures], base: Sequence[CellFigures], key: str) -> Any:
    return mean(ratios(cells, base, key))


def max_ratio(cells: Sequence[CellFigures], base: Sequence[CellFigures], key: str) -> Any:
    return maximum(ratios(cells, base, key))


def hit_rate(cells: Sequence[CellFigures]) -> Any:
    """Returns the mean hit rate of the cells' decode steps."""
    return mean(cell.hit_rate for cell in cells)
