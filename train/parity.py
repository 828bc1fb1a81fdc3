"""Check that exported predictors answer as the trained networks."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from collect.traces import TraceSignal
from predictors.base import Floats, Forecasts, Predictor, Signal
from train.data import Batch
from train.errors import ParityError
from train.predictor_stack import PredictorStack, ReferenceScores

LEAST_PARITY = 0.999
"""Share of held-out tokens on which torch and onnxruntime must choose the same top_k set."""


@dataclass(frozen=True)
class Parity:
    """Agreement of the exported networks with torch on held-out tokens."""

    tokens: int
    """(token, network) pairs compared."""
    same_top_k: float
    max_abs_difference: float
    """Largest difference of scores, which lie in [0, 1]."""


@dataclass
class _Count:
    same: int = 0
    seen: int = 0
    worst: float = 0.0

    def add(self, expected_BE: Floats, found_BE: Floats, top_k: int) -> None:
        self.same += same_sets(expected_BE, found_BE, top_k)
        self.seen += len(expected_BE)
        self.worst = max(self.worst, float(np.abs(expected_BE - found_BE).max(initial=0.0)))


def check_parity(
    family: PredictorStack,
    exported: Mapping[str, Predictor],
    batches: Iterable[Batch],
    *,
    top_k: int,
) -> dict[str, Parity]:
    """Compare the scores of torch and onnxruntime, each token as the first of a separate request.

    Raises ParityError when a kind's top_k sets agree on less than `LEAST_PARITY` of the tokens.
    """
    counts = {kind: _Count() for kind in exported}
    first_request = 0
    for batch in batches:
        num_tokens = batch.chosen_LBK.size(1)
        requests = np.arange(first_request, first_request + num_tokens)
        first_request += num_tokens
        for predictor in exported.values():
            predictor.begin_step(np.zeros(num_tokens, np.int64), requests)
        answered: dict[tuple[str, Signal, int], Forecasts] = {}
        for answer in family.answers(batch):
            key = answer[:3]
            if key not in answered:
                answered[key] = answer_event(exported[answer.kind], answer, batch)
            (forecast,) = (one for one in answered[key] if one.layer == answer.target)
            counts[answer.kind].add(answer.scores_BE, forecast.scores_TE, top_k)
    found = {kind: Parity(one.seen, one.same / one.seen, one.worst) for kind, one in counts.items()}
    for kind, one in found.items():
        if one.same_top_k < LEAST_PARITY:
            raise ParityError(
                f"the exported {kind} networks choose torch's top {top_k} on "
                f"{one.same_top_k:.4%} of {one.tokens:,} tokens; at least {LEAST_PARITY:.1%} must"
            )
    return found


def answer_event(predictor: Predictor, answer: ReferenceScores, batch: Batch) -> Forecasts:
    """Returns the predictor's forecasts at the event of the reference scores."""
    hidden = batch.states[TraceSignal(str(answer.signal))][answer.source].cpu().numpy()
    if answer.signal is Signal.LAYER_INPUT:
        return predictor.layer_input(answer.source, hidden)
    return predictor.gate_input(answer.source, hidden)


def same_sets(one_BE: Floats, other_BE: Floats, top_k: int) -> int:
    """Rows on which both choose the same `top_k` experts, in whatever order."""
    best = [np.argsort(-one, axis=1, kind="stable")[:, :top_k] for one in (one_BE, other_BE)]
    return int((np.sort(best[0]) == np.sort(best[1])).all(axis=1).sum())
