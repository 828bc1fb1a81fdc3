"""Training data of `reuse`: rows of a trace, with what was routed before them and will be after.

Rows depend on their neighbours, as a server runs them. So neighbouring rows are read and computed
together, as a stretch; its rows are then mixed.

Shape suffixes: L layers, N rows, B batch or stretch, D hidden size, E experts, K top_k, F fading
sums of an expert.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from collect.traces import Trace, TraceSignal
from predictors.base import Floats, softmax
from predictors.reuse import NUM_FADING, fade, mark_used, normalize_sums
from train.data import Batch, TraceBatches, TraceSubset

STRETCH_ROWS = 4_096
"""Rows of a stretch."""

WARM_UP = 128
"""Rows before a stretch that are counted first."""

GAMMA = 0.7
"""Discount of a use one token later. .9 and .97 give slightly worse hit rates."""

AHEAD = 24
"""Rows behind a stretch that are looked at: .7 ** 24 is a five-thousandth."""

NOTHING = torch.empty(0)


@dataclass
class ReuseBatch(Batch):
    """Gate inputs in `states`, with fading counts of the past and discounted uses of the future."""

    fading_LBX: Tensor = NOTHING
    """`[L, B, F E]`: the decaying means that the networks see."""
    value_LBE: Tensor = NOTHING
    """Share of the near future in which each expert is used, in [0, 1]."""

    @classmethod
    def of(cls, gate_LBD: Tensor, chosen: Tensor, fading: Tensor, value: Tensor) -> "ReuseBatch":
        return cls(chosen, {TraceSignal.GATE_INPUT: gate_LBD}, fading_LBX=fading, value_LBE=value)

    def take(self, rows: Tensor) -> "ReuseBatch":
        """Return some of the rows."""
        return ReuseBatch.of(
            self.gate_LBD[:, rows],
            self.chosen_LBK[:, rows],
            self.fading_LBX[:, rows].float(),
            self.value_LBE[:, rows],
        )


def read_stretch(
    trace: Trace,
    rows_N: NDArray[np.int64],
    first: int,
    last: int,
) -> ReuseBatch:
    """Rows `first..last` of `rows_N`, one request after another as a server without rest runs them.

    A prompt counts token by token, as generated tokens do. `last` is excluded.
    """
    spec, layers = trace.spec, range(trace.spec.num_layers)

    def read(signal: TraceSignal, rows: NDArray[np.int64]) -> NDArray:
        return np.stack([trace.column(signal, layer)[rows] for layer in layers])

    start = max(0, first - WARM_UP)
    inside = slice(first - start, last - start)
    chosen_LNK = read(TraceSignal.EXPERTS, rows_N[start : last + AHEAD]).astype(np.int64)
    used_NLE = np.stack([mark_used(own_NK, spec.num_experts) for own_NK in chosen_LNK], axis=1)
    gate_LND = read(TraceSignal.GATE_INPUT, rows_N[first:last]).astype(np.float32)
    logits_LNE = read(TraceSignal.GATE_LOGITS, rows_N[start:last]).astype(np.float32)
    chance_NLE = softmax(logits_LNE).swapaxes(0, 1)
    state_LFE = np.zeros((spec.num_layers, NUM_FADING, spec.num_experts), np.float32)
    fading_BLFE = np.empty((last - first, *state_LFE.shape), np.float16)
    for place in range(last - start):
        fade(state_LFE, used_NLE[place], chance_NLE[place])
        if place >= inside.start:
            fading_BLFE[place - inside.start] = normalize_sums(state_LFE)
    value_BLE = future(used_NLE[inside.start :], GAMMA)[: last - first]
    return ReuseBatch.of(
        torch.from_numpy(gate_LND),
        torch.from_numpy(chosen_LNK[:, inside]),
        torch.from_numpy(fading_BLFE.reshape(*fading_BLFE.shape[:2], -1).swapaxes(0, 1)),
        torch.from_numpy(value_BLE.swapaxes(0, 1)),
    )


def future(used_NLE: Floats, gamma: float) -> Floats:
    """`(1 - gamma) / gamma * sum over t > 0 of gamma^t used(row + t)`, rows in order."""
    value_NLE = np.zeros_like(used_NLE)
    for row in range(len(used_NLE) - 2, -1, -1):
        value_NLE[row] = gamma * value_NLE[row + 1] + (1 - gamma) * used_NLE[row + 1]
    return value_NLE


ReadStretch = Callable[[NDArray[np.int64], int, int], ReuseBatch]
"""`read_stretch` of a trace: rows, of which those from the second to the third argument."""


class ReuseBatches(TraceBatches):
    """Stretches of the trace in random order, their tokens in random order.

    A pass drops what does not fill a batch. `epoch` None: in order, nothing dropped.
    """

    def __init__(self, trace: Trace, part: TraceSubset, *, read: ReadStretch, **options: Any):
        super().__init__(trace, part, **options)
        self._read = read

    def __len__(self) -> int:
        sizes = np.diff([*range(0, len(self._rows), STRETCH_ROWS), len(self._rows)])
        if self._epoch is not None:
            return int((sizes // self._batch_size).sum())
        return int((-(-sizes // self._batch_size)).sum())

    def __iter__(self) -> Iterator[Batch]:
        random = np.random.default_rng([self._seed, self._epoch or 0])
        starts = np.arange(0, len(self._rows), STRETCH_ROWS)
        number, devices = self._share
        for first in (starts if self._epoch is None else random.permutation(starts)).tolist():
            last = min(first + STRETCH_ROWS, len(self._rows))
            stretch = self._read(self._rows, first, last)
            order = np.arange(last - first)
            if self._epoch is not None:
                order = random.permutation(order)
                order = order[: len(order) // self._batch_size * self._batch_size]
            for place in range(0, len(order), self._batch_size):
                take = order[place : place + self._batch_size][number::devices]
                yield stretch.take(torch.from_numpy(take))
