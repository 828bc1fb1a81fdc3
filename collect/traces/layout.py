"""Columns of a trace: names, element types, widths.

Every row is one token that went through the model. Rows of a request stand together, in the order
in which the model saw them. Per-token columns are `request`, `position`, `token` (int32) and
`phase` (int8); beside them stands one fixed-width list column per (signal, layer), named
`gate_input.07`, so that a layer's columns are read without touching the others.
"""

import hashlib
from collections.abc import Iterable, Mapping
from enum import StrEnum

import numpy as np

from predictors.spec import ModelSpec


class TraceSignal(StrEnum):
    """What a trace can hold for each token and layer."""

    LAYER_INPUT = "layer_input"
    GATE_INPUT = "gate_input"
    GATE_LOGITS = "gate_logits"
    EXPERTS = "experts"
    WEIGHTS = "weights"


ALL_SIGNALS = tuple(TraceSignal)
ROUTING_SIGNALS = (TraceSignal.EXPERTS, TraceSignal.WEIGHTS)

TOKEN_DTYPES: Mapping[str, np.dtype] = {
    "request": np.dtype(np.int32),
    "position": np.dtype(np.int32),
    "phase": np.dtype(np.int8),
    "token": np.dtype(np.int32),
}


def column_name(signal: TraceSignal, layer: int) -> str:
    """Two digits, so that names sort as layers do in every model there is."""
    return f"{signal}.{layer:02d}"


def signal_dtype(signal: TraceSignal) -> np.dtype:
    """Half precision, and int16 for ids: the largest models have a few hundred experts."""
    return np.dtype(np.int16 if signal is TraceSignal.EXPERTS else np.float16)


def signal_width(signal: TraceSignal, spec: ModelSpec) -> int:
    """Elements per token and layer."""
    if signal in (TraceSignal.LAYER_INPUT, TraceSignal.GATE_INPUT):
        return spec.hidden_size
    return spec.num_experts if signal is TraceSignal.GATE_LOGITS else spec.top_k


def trace_columns(
    spec: ModelSpec, signals: Iterable[TraceSignal]
) -> dict[str, tuple[np.dtype, int]]:
    """Name to element type and width of every column; width 0 is a plain number per token."""
    found = {name: (dtype, 0) for name, dtype in TOKEN_DTYPES.items()}
    for signal in signals:
        for layer in range(spec.num_layers):
            found[column_name(signal, layer)] = signal_dtype(signal), signal_width(signal, spec)
    return found


def row_bytes(spec: ModelSpec, signals: Iterable[TraceSignal]) -> int:
    """Bytes of one token on disk."""
    return sum(
        dtype.itemsize * max(1, width) for dtype, width in trace_columns(spec, signals).values()
    )


HELD_OUT_OF = 10
"""One request in ten is held out."""


class Split(StrEnum):
    """Which requests a row may be used for. Never by token: neighbours would leak."""

    TRAIN = "train"
    HELD_OUT = "held_out"


def prompt_digest(text: str) -> str:
    """sha256 of the prompt's text: the request's identity in every trace of every model."""
    return hashlib.sha256(text.encode("utf-8", errors="surrogatepass")).hexdigest()


def choose_split(digest: str) -> Split:
    """The same prompt is on the same side in every trace, so that traces can be joined."""
    return Split.HELD_OUT if int(digest[:12], 16) % HELD_OUT_OF == 0 else Split.TRAIN
