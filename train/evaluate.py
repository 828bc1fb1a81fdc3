"""Scores predictors on held-out requests through the protocol: what is scored is what ships.

Shape suffixes: T tokens, D hidden, E experts, K top_k, L layers.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from collect.traces import Trace, TraceSignal
from predictors.base import Floats, Forecast, Ints, Predictor, Signal
from predictors.metrics import LayerScore, Phase, total
from runtime.sim.replay import Step

BLOCK_TOKENS = 4_096
"""Tokens scored at once where their grouping does not matter: 1 MB of scores at 60 experts."""


class Tokens(Step, Protocol):
    """Recorded tokens with what the model computed for them; `collect.traces.Step` is one."""

    def weights(self, layer: int) -> Floats: ...


@dataclass(frozen=True)
class Block:
    """Any rows of a trace as if they had been one step."""

    trace: Trace
    rows: NDArray[np.int64]

    @property
    def tokens_T(self) -> Ints:
        return self.trace.tokens[self.rows].astype(np.int64)

    @property
    def requests_T(self) -> Ints:
        return self.trace.requests[self.rows].astype(np.int64)

    def layer_input(self, layer: int) -> Floats:
        return self._column(TraceSignal.LAYER_INPUT, layer).astype(np.float32)

    def gate_input(self, layer: int) -> Floats:
        return self._column(TraceSignal.GATE_INPUT, layer).astype(np.float32)

    def logits(self, layer: int) -> Floats:
        return self._column(TraceSignal.GATE_LOGITS, layer).astype(np.float32)

    def experts(self, layer: int) -> Ints:
        return self._column(TraceSignal.EXPERTS, layer).astype(np.int64)

    def weights(self, layer: int) -> Floats:
        return self._column(TraceSignal.WEIGHTS, layer).astype(np.float32)

    def _column(self, signal: TraceSignal, layer: int) -> NDArray:
        return self.trace.column(signal, layer)[self.rows]


def blocks(trace: Trace, split: str) -> Iterator[Block]:
    """The split's tokens in the trace's order, `BLOCK_TOKENS` at a time."""
    rows = trace.rows(split)
    for first in range(0, len(rows), BLOCK_TOKENS):
        yield Block(trace, rows[first : first + BLOCK_TOKENS])


def phased(trace: Trace, split: str, *, grouped: bool) -> Iterator[tuple[Tokens, Ints]]:
    """The split's tokens with the phase of each: in large blocks, or step by step as they ran."""
    if grouped:
        for block in blocks(trace, split):
            yield block, trace.phases[block.rows].astype(np.int64)
    else:
        for step in trace.steps(split):
            yield step, np.full(step.num_tokens, step.phase, dtype=np.int64)


def forecasts(predictor: Predictor, step: Tokens) -> Iterator[Forecast]:
    """Sends the step's events in the model's order, and yields what is answered."""
    signals = predictor.signals
    yield from predictor.begin_step(step.tokens_T, step.requests_T)
    for layer in range(predictor.spec.num_layers):
        if Signal.LAYER_INPUT in signals:
            yield from predictor.layer_input(layer, step.layer_input(layer))
        if Signal.GATE_INPUT in signals:
            yield from predictor.gate_input(layer, step.gate_input(layer))
        if Signal.ROUTED in signals:
            logits_TE = step.logits(layer) if Signal.LOGITS in signals else None
            yield from predictor.routed(layer, step.experts(layer), logits_TE)
    predictor.end_step()


def score(predictor: Predictor, trace: Trace, split: str = "held_out") -> list[LayerScore]:
    """One LayerScore for each target layer; a layer that was never forecast stays empty.

    A layer forecast several times in a step is scored on the last forecast before its router.
    """
    spec = predictor.spec
    weighted = TraceSignal.WEIGHTS in trace.signals
    scores = [LayerScore(spec.top_k) for _ in range(spec.num_layers)]
    for step, phases_T in phased(trace, split, grouped=predictor.stateless):
        last = {forecast.layer: forecast for forecast in forecasts(predictor, step)}
        for layer, forecast in last.items():
            scores[layer].add(
                forecast.scores_TE,
                step.experts(layer),
                phases_T=phases_T,
                weights_TK=step.weights(layer) if weighted else None,
            )
    return scores


def accuracy_table(scores: list[LayerScore]) -> dict[str, Any]:
    """Figures per layer and their mean over the layers that were forecast; null: not forecast."""
    extras = scores[0].extras
    return {
        "accuracy": [one.overall.value for one in scores],
        "accuracy_prefill": [one.accuracy[Phase.PREFILL].value for one in scores],
        "accuracy_decode": [one.accuracy[Phase.DECODE].value for one in scores],
        "gate_mass_recall": [one.gate_mass.value for one in scores],
        **{f"recall_plus_{m}": [recall(one, m) for one in scores] for m in extras},
        "calibration_error": [one.calibration.error for one in scores],
        "tokens": int(max(one.overall.count / one.top_k for one in scores)),
        "mean_accuracy": total([one.overall for one in scores]).value,
    }


def recall(score: LayerScore, extra: int) -> float | None:
    return score.recall[extra].value if extra in score.recall else None
