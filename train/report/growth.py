"""Accuracy of counted predictors against the number of training requests."""

import hashlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from collect.traces import Trace
from collect.traces.layout import Split
from collect.traces.reader import TraceStep
from predictors.base import Predictor
from predictors.baselines import PopularityPredictor, TokenPredictor
from predictors.metrics import sum_means
from train.accuracy import score_layers
from train.nonlearned import fit_popularity, fit_token

SHARES = (0.125, 0.25, 0.5, 1.0)
"""Shares of the training requests."""
COUNTED: Mapping[str, Callable[[Trace], Predictor]] = {
    TokenPredictor.kind: fit_token,
    PopularityPredictor.kind: fit_popularity,
}
"""Kinds that take no more than seconds on any trace."""


class TraceShare(Trace):
    """A trace of which some training requests are not looked at."""

    def __init__(self, whole: Trace, kept: set[int]):
        super().__init__(whole.path, whole.manifest, whole._shards, whole.request_table)
        self._kept = np.array(sorted(kept))

    def rows(self, split: str) -> NDArray[np.int64]:
        rows = super().rows(split)
        if Split(split) is not Split.TRAIN:
            return rows
        return rows[np.isin(self.requests[rows], self._kept)]

    def steps(self, split: str | None = None) -> Iterator[TraceStep]:
        for step in super().steps(split):
            training = self.request_table[step.request].split is Split.TRAIN
            if not training or step.request in self._kept:
                yield step


def take_share(trace: Trace, share: float) -> TraceShare:
    """A share of the training requests; a smaller one is part of a larger one."""
    train = [one for one in trace.request_table if one.split is Split.TRAIN]
    train.sort(key=lambda one: hashlib.sha256(f"ceiling {one.digest}".encode()).hexdigest())
    return TraceShare(trace, {one.index for one in train[: max(1, round(len(train) * share))]})


def measure_growth(trace: Trace) -> list[dict[str, Any]]:
    """Rows as `benchmarks/ceiling.py` writes them, for the kinds that are counted; held out."""
    rows = []
    for share in SHARES:
        part = take_share(trace, share)
        seen = part.rows("train")
        for kind, fit in COUNTED.items():
            layers = [one.overall for one in score_layers(fit(part), trace)]
            known = [one.value for one in layers if one.value is not None]
            if not known:
                continue  # it forecasts nothing from what this trace has
            rows.append(
                {
                    "predictor": kind,
                    "train_tokens": len(seen),
                    "prompts": len(np.unique(trace.requests[seen])),
                    "horizon": None,
                    "mean_accuracy": sum_means(layers).value,
                    "worst_layer_accuracy": min(known),
                }
            )
    return rows
