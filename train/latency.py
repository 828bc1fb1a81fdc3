"""Time of a prediction on this machine, at the batch sizes of serving.

Shape suffixes: B requests that decode together.
"""

import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from collect.traces import Trace
from predictors.base import Predictor, Signal
from predictors.metrics import Phase
from train.accuracy import TraceBlock, untouched

BATCHES = (1, 8, 64)
WARM_STEPS = 3
"""Sessions and caches are warm from then on."""


def decode_steps(trace: Trace, batch: int, num_steps: int, split: str) -> Iterator[TraceBlock]:
    """Yield steps in which `batch` requests decode one token each, as a server runs them."""
    rows = trace.rows(split)
    rows = rows[trace.phases[rows] == Phase.DECODE]
    starts = np.flatnonzero(np.diff(trace.requests[rows], prepend=-1))
    lengths = np.diff(starts, append=len(rows))
    if not len(starts):
        return
    # Round and round where there are fewer requests or tokens than that.
    which_B = np.arange(batch) % len(starts)
    for step in range(num_steps):
        turn = step + np.arange(batch) // len(starts)
        yield TraceBlock(trace, rows[starts[which_B] + turn % lengths[which_B]])


def measure_latency(
    predictor: Predictor, trace: Trace, *, num_steps: int = 40, split: str = "held_out"
) -> dict[str, Any]:
    """Measures the time of a predictor's events for each batch size, in microseconds.

    Returns median and 99th percentile of one layer's events, and of a step's beginning and end;
    null if the trace has no generated tokens.
    """
    return {
        str(batch): _timed(untouched(predictor), list(decode_steps(trace, batch, num_steps, split)))
        for batch in BATCHES
    }


def _timed(predictor: Predictor, steps: list[TraceBlock]) -> dict[str, float] | None:
    signals = predictor.signals
    layers: list[float] = []
    ends: list[float] = []
    for place, step in enumerate(steps):
        # Requests of their own, so that no id stands for two tokens of a step.
        requests = np.arange(len(step.rows))
        inputs = [
            (
                step.layer_input(layer) if Signal.LAYER_INPUT in signals else None,
                step.gate_input(layer) if Signal.GATE_INPUT in signals else None,
                step.experts(layer) if Signal.ROUTED in signals else None,
                step.logits(layer) if Signal.LOGITS in signals else None,
            )
            for layer in range(predictor.spec.num_layers)
        ]
        tokens = step.tokens_T
        started = time.perf_counter()
        predictor.begin_step(tokens, requests)
        edge = time.perf_counter() - started
        taken = []
        for layer, (entering, gated, experts, logits) in enumerate(inputs):
            started = time.perf_counter()
            if entering is not None:
                predictor.layer_input(layer, entering)
            if gated is not None:
                predictor.gate_input(layer, gated)
            if experts is not None:
                predictor.routed(layer, experts, logits)
            taken.append(time.perf_counter() - started)
        started = time.perf_counter()
        predictor.end_step()
        edge += time.perf_counter() - started
        if place >= WARM_STEPS:
            layers += taken
            ends.append(edge)
    if not layers:
        return None
    return {
        "layer_p50": micro(layers, 50),
        "layer_p99": micro(layers, 99),
        "begin_and_end_p50": micro(ends, 50),
        "begin_and_end_p99": micro(ends, 99),
    }


def micro(seconds: list[float], percent: float) -> float:
    """A percentile in microseconds."""
    return round(float(np.percentile(seconds, percent)) * 1e6, 1)
