"""Columns of a trace: names, element types, widths.

Each row is a token that went through the model. Rows of a request are contiguous, in the order in
which the model computed them. Per-token columns are `request`, `position`, `token` (int32) and
`phase` (int8). Each (signal, layer) has a fixed-width list column, such as `gate_input.07`, so that
the columns of a layer are read without the others.
"""

import hashlib
from collections.abc import Iterable, Mapping
from enum import StrEnum

import numpy as np

from predictors.base import Signal
from predictors.spec import ModelSpec


class TraceSignal(StrEnum):
    """Signals that a trace can contain for each token and layer."""

    LAYER_INPUT = "layer_input"
    GATE_INPUT = "gate_input"
    GATE_LOGITS = "gate_logits"
    EXPERTS = "experts"
    WEIGHTS = "weights"


ALL_SIGNALS = tuple(TraceSignal)
PROBES = {
    TraceSignal.LAYER_INPUT: Signal.LAYER_INPUT,
    TraceSignal.GATE_INPUT: Signal.GATE_INPUT,
    TraceSignal.GATE_LOGITS: Signal.LOGITS,
    TraceSignal.EXPERTS: Signal.ROUTED,
    TraceSignal.WEIGHTS: Signal.WEIGHTS,
}
"""The model's value that is recorded as each signal."""
ROUTING_SIGNALS = (TraceSignal.EXPERTS, TraceSignal.WEIGHTS)

TOKEN_DTYPES: Mapping[str, np.dtype] = {
    "request": np.dtype(np.int32),
    "position": np.dtype(np.int32),
    "phase": np.dtype(np.int8),
    "token": np.dtype(np.int32),
}


def column_name(signal: TraceSignal, layer: int) -> str:
    """Returns SIGNAL.LAYER with two digits, so that names sort by layer."""
    return f"{signal}.{layer:02d}"


def signal_dtype(signal: TraceSignal) -> np.dtype:
    """Returns half precision, or int16 for expert ids."""
    return np.dtype(np.int16 if signal is TraceSignal.EXPERTS else np.float16)


def signal_width(signal: TraceSignal, spec: ModelSpec) -> int:
    """Returns the elements per token and layer."""
    if signal in (TraceSignal.LAYER_INPUT, TraceSignal.GATE_INPUT):
        return spec.hidden_size
    return spec.num_experts if signal is TraceSignal.GATE_LOGITS else spec.top_k


def trace_columns(
    spec: ModelSpec, signals: Iterable[TraceSignal]
) -> dict[str, tuple[np.dtype, int]]:
    """Returns element type and width of each column by name; width 0 is a scalar per token."""
    widths = {name: (dtype, 0) for name, dtype in TOKEN_DTYPES.items()}
    for signal in signals:
        for layer in range(spec.num_layers):
            widths[column_name(signal, layer)] = signal_dtype(signal), signal_width(signal, spec)
    return widths


def row_bytes(spec: ModelSpec, signals: Iterable[TraceSignal]) -> int:
    return sum(
        dtype.itemsize * max(1, width) for dtype, width in trace_columns(spec, signals).values()
    )


HELD_OUT_OF = 10
"""One request in ten is held out."""


class Split(StrEnum):
    """Training or evaluation. Requests are split, not tokens: neighbouring tokens would leak."""

    TRAIN = "train"
    HELD_OUT = "held_out"


def prompt_digest(text: str) -> str:
    """Returns the sha256 of a prompt, which identifies the request in the traces of all models."""
    return hashlib.sha256(text.encode("utf-8", errors="surrogatepass")).hexdigest()


def choose_split(digest: str) -> Split:
    """Returns the split of a prompt, the same in every trace, so that traces can be joined."""
    return Split.HELD_OUT if int(digest[:12], 16) % HELD_OUT_OF == 0 else Split.TRAIN
