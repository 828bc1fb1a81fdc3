"""Definitions of the metrics that training, replay and the live runtime report.

Every metric is a sum and a count, so that layers, phases and runs are added before the division; a
metric without samples is None, never 0 or 1.

Shape suffixes: T tokens, E experts, K top_k.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from predictors.typed_values import read_table

Floats = NDArray[np.float32]
Ints = NDArray[np.int64]

DEFINITIONS: Mapping[str, str] = read_table(Path(__file__).with_suffix(".yaml"))
"""Printed and stored with the metrics: "accuracy" has four meanings in the literature."""

CALIBRATION_BINS = 15
"""Usual in the literature (Guo et al. 2017); equal width."""


class Phase(IntEnum):
    """The phase of a request to which a token belongs, as numbered in traces."""

    PREFILL = 0
    DECODE = 1


@dataclass
class MeanAccumulator:
    sum: float = 0.0
    count: float = 0.0

    def add(self, sum: float, count: float) -> None:
        self.sum += float(sum)
        self.count += float(count)

    @property
    def value(self) -> float | None:
        return self.sum / self.count if self.count else None

    def __add__(self, other: "MeanAccumulator") -> "MeanAccumulator":
        return MeanAccumulator(self.sum + other.sum, self.count + other.count)


def sum_means(shares: Sequence[MeanAccumulator]) -> MeanAccumulator:
    """Adds accumulators: the result is the mean over all samples, not the mean of the means."""
    return sum(shares, MeanAccumulator())


def match_chosen_TK(ranked_TK: Ints, chosen_TK: Ints) -> NDArray[np.bool_]:
    """Returns whether each chosen expert is predicted; `ranked` may be wider than top_k."""
    return (chosen_TK[:, :, None] == ranked_TK[:, None, :]).any(axis=2)


def mark_used(experts_TK: Ints, num_experts: int) -> Floats:
    """Returns `[T, E]`: 1 where the token is routed to the expert; the id `num_experts` is none."""
    used_TE = np.zeros((len(experts_TK), num_experts + 1), np.float32)
    np.put_along_axis(used_TE, experts_TK, 1.0, axis=1)
    return used_TE[:, :num_experts]


def good_pred(accuracy: float | None, fetch_rate: float | None) -> float | None:
    """Returns Accuracy x FetchRate (ProMoE, section 4.1); None if either was not measured.

    Both must be of the same requests, in the same phase.
    """
    return None if accuracy is None or fetch_rate is None else accuracy * fetch_rate


@dataclass
class CalibrationBins:
    """Scores against choices, over (token, expert) pairs, in bins of equal width."""

    sums_3B: NDArray[np.float64] = field(default_factory=lambda: np.zeros((3, CALIBRATION_BINS)))
    """Sum of scores, number of chosen experts and number of pairs in each bin."""

    def add(self, scores_TE: Floats, chosen_TK: Ints) -> None:
        bins_TE = np.minimum((scores_TE * CALIBRATION_BINS).astype(np.int64), CALIBRATION_BINS - 1)
        happened_TE = mark_used(chosen_TK, scores_TE.shape[1])
        for sums_B, values_TE in zip(self.sums_3B, (scores_TE, happened_TE, None), strict=True):
            weights = None if values_TE is None else values_TE.ravel()
            sums_B += np.bincount(bins_TE.ravel(), weights, CALIBRATION_BINS)

    def __add__(self, other: "CalibrationBins") -> "CalibrationBins":
        return CalibrationBins(self.sums_3B + other.sums_3B)

    def as_dict(self) -> dict[str, Any]:
        """Returns the data of a reliability diagram, and the error.

        For each bin: number of pairs, mean score, and share of chosen experts (None if empty).
        """
        bins = self.sums_3B.T
        return {
            "pairs": [int(count) for _, _, count in bins],
            "score": [float(score / count) if count else None for score, _, count in bins],
            "chosen": [float(chosen / count) if count else None for _, chosen, count in bins],
            "error": self.error,
        }

    @property
    def error(self) -> float | None:
        """Expected calibration error, in [0, 1]; small, as most pairs have scores near 0."""
        score_B, chosen_B, count_B = self.sums_3B
        return float(np.abs(score_B - chosen_B).sum() / count_B.sum()) if count_B.any() else None


def make_means() -> dict[Any, MeanAccumulator]:
    return defaultdict(MeanAccumulator)


@dataclass
class LayerScore:
    top_k: int
    extras: tuple[int, ...] = (1, 2, 4)
    """The m of recall@k+m."""
    accuracy: dict[Phase, MeanAccumulator] = field(default_factory=make_means)
    gate_mass: MeanAccumulator = field(default_factory=MeanAccumulator)
    recall: dict[int, MeanAccumulator] = field(default_factory=make_means)
    calibration: CalibrationBins = field(default_factory=CalibrationBins)

    def add(
        self,
        scores_TE: Floats,
        chosen_TK: Ints,
        *,
        phases_T: Ints,
        weights_TK: Floats | None = None,
    ) -> None:
        """Compares the forecasts of T tokens with the experts that the router chose.

        The id E, no choice, is left out.
        """
        widest = min(self.top_k + max(self.extras, default=0), scores_TE.shape[1])
        ranked = np.argsort(-scores_TE, axis=1, kind="stable")[:, :widest]
        hit_TK = match_chosen_TK(ranked[:, : self.top_k], chosen_TK)
        made_TK = chosen_TK < scores_TE.shape[1]
        for phase in Phase:
            in_phase = phases_T == phase
            self.accuracy[phase].add(hit_TK[in_phase].sum(), made_TK[in_phase].sum())
        if weights_TK is not None:
            self.gate_mass.add((hit_TK * weights_TK).sum(), (made_TK * weights_TK).sum())
        for extra in self.extras:
            wider_TK = match_chosen_TK(ranked[:, : self.top_k + extra], chosen_TK)
            self.recall[extra].add(wider_TK.sum(), made_TK.sum())
        self.calibration.add(scores_TE, chosen_TK)

    @property
    def overall(self) -> MeanAccumulator:
        return sum_means(list(self.accuracy.values()))


ENTRY = "entry"
"""Name of the distance of forecasts at a step's start or from the first layer's input."""


def name_distance(signal: str, layer: int, target: int) -> str:
    """Returns the number of layers that a forecast looks ahead, or `ENTRY`.

    Args:
        signal: Event that was answered with the forecast.
        layer: Layer of the event; negative at the beginning of a step.
        target: Layer that was forecast.
    """
    # The input of the first layer is all that its first forecasts can have.
    if layer < 0 or (signal == "layer_input" and layer == 0):
        return ENTRY
    return f"{target - layer}"


Accuracies = Sequence[float | None]
"""One for each layer; None: not forecast, or not measured."""


@dataclass(frozen=True, kw_only=True)
class CardAccuracy:
    """Held-out accuracy of an entry, as `moecast train` measured it."""

    entry: str
    """Name of the entry."""
    decode: Accuracies
    """In decode steps, of each layer's last forecast."""
    overall: Accuracies
    """The same in all steps."""
    by_distance: Mapping[str, Accuracies] = field(default_factory=dict)
    """In all steps, of all forecasts at a distance (`name_distance`); empty for predictors with one
    distance."""

    def expect(self, layer: int, distance: str) -> float | None:
        """Returns the accuracy to expect in decode steps of a layer forecast at this distance.

        A layer's last forecast is often too late to be used. The difference to earlier ones was
        measured over all steps.
        """
        decode = self.decode[layer]
        if decode is None or not self.by_distance:
            return decode
        last, earlier = self.overall[layer], self._find(layer, distance)
        return None if last is None or earlier is None else decode - (last - earlier)

    def _find(self, layer: int, distance: str) -> float | None:
        accuracies = self.by_distance.get(distance)
        return None if accuracies is None else accuracies[layer]

    @classmethod
    def parse(cls, entry: str, table: Mapping[str, Any], *, num_layers: int) -> Self | None:
        """Reads the layers' table of an entry's `metrics.json`, which anyone may have written.

        Returns None if it does not have the accuracies of all layers.
        """
        decode = parse_accuracies(table.get("accuracy_decode"), num_layers)
        overall = parse_accuracies(table.get("accuracy"), num_layers)
        if decode is None or overall is None:
            return None
        horizons = table.get("by_horizon")
        parsed = {
            str(name): parse_accuracies(figures.get("accuracy"), num_layers)
            for name, figures in (horizons.items() if isinstance(horizons, dict) else ())
            if isinstance(figures, dict)
        }
        by_distance = {name: values for name, values in parsed.items() if values is not None}
        return cls(entry=entry, decode=decode, overall=overall, by_distance=by_distance)


def parse_accuracies(values: object, num_layers: int) -> tuple[float | None, ...] | None:
    """Returns a list of shares, one for each layer; None if it is anything else."""
    if not isinstance(values, list) or len(values) != num_layers:
        return None
    if not all(one is None or (isinstance(one, int | float) and 0 <= one <= 1) for one in values):
        return None
    return tuple(values)
