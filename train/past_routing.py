"""Fading sums of past routing for neighbouring rows of a trace, and the routing behind them.

Shape suffixes: L layers, N rows, B rows of a stretch, D hidden size, E experts, K top_k, F fading
sums of an expert.
"""

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from collect.traces import Trace, TraceSignal
from predictors.base import Floats, softmax
from predictors.fading import NUM_FADING, fade, mark_used, normalize_sums

WARM_UP = 128
"""Rows before a stretch that are counted first."""


class PastRouting(NamedTuple):
    """Rows of a stretch: their router inputs and experts, and what was routed up to them."""

    gate_LBD: Tensor
    chosen_LBK: Tensor
    fading_LBX: Tensor
    """`[L, B, F E]`, float16: the decaying means that networks see."""


def read_past(
    trace: Trace,
    rows_N: NDArray[np.int64],
    first: int,
    last: int,
    routers_LED: Floats,
    biases_LE: Floats,
) -> PastRouting:
    """Return rows `first..last` of `rows_N`; `last` is excluded."""
    spec = trace.spec
    start = max(0, first - WARM_UP)
    rows, layers = rows_N[start:last], range(spec.num_layers)
    gate_LND = np.stack([trace.column(TraceSignal.GATE_INPUT, layer)[rows] for layer in layers])
    gate_LND = gate_LND.astype(np.float32)
    chosen_LNK = read_chosen(trace, rows)
    used_NLE = mark_layers(chosen_LNK, spec.num_experts)
    chance_NLE = np.stack(
        [softmax(gate_LND[layer] @ routers_LED[layer].T + biases_LE[layer]) for layer in layers],
        axis=1,
    )
    state_LFE = np.zeros((spec.num_layers, NUM_FADING, spec.num_experts), np.float32)
    fading = np.empty((last - first, *state_LFE.shape), np.float16)
    for place in range(last - start):
        fade(state_LFE, used_NLE[place], chance_NLE[place])
        if place >= first - start:
            fading[place - (first - start)] = normalize_sums(state_LFE)
    inside = slice(first - start, None)
    return PastRouting(
        torch.from_numpy(gate_LND[:, inside]),
        torch.from_numpy(chosen_LNK[:, inside]),
        torch.from_numpy(fading.reshape(last - first, spec.num_layers, -1).swapaxes(0, 1)),
    )


def read_used(trace: Trace, rows_N: NDArray[np.int64]) -> Floats:
    """Return `[N, L, E]`: 1 where the row's token is routed to the expert."""
    return mark_layers(read_chosen(trace, rows_N), trace.spec.num_experts)


def read_chosen(trace: Trace, rows_N: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return `[L, N, K]`: the experts of each row in each layer."""
    layers = range(trace.spec.num_layers)
    chosen = [trace.column(TraceSignal.EXPERTS, layer)[rows_N] for layer in layers]
    return np.stack(chosen).astype(np.int64)


def mark_layers(chosen_LNK: NDArray[np.int64], num_experts: int) -> Floats:
    """Return `[N, L, E]`: 1 for each chosen expert."""
    return np.stack([mark_used(layer_NK, num_experts) for layer_NK in chosen_LNK], axis=1)
