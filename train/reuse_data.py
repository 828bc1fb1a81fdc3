"""Training data of `reuse`: each token's fading counts, and the later uses of each expert.

Shape suffixes: L layers, N rows of a pool, B batch, D hidden size, E experts, K top_k, F fading
sums of an expert.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import IterableDataset

from collect.traces import Trace, TraceSignal
from predictors.base import Floats, softmax
from predictors.reuse import NUM_FADING, fade, mark_used, normalize_sums
from train.data import Batch, EpochData, TraceSubset, subset_rows

GAMMA = 0.7
"""Discount of a use one token later. .9 and .97 give slightly worse hit rates."""

POOL_ROWS = 4_096
"""Neighbouring rows whose counts are made together and whose tokens are then mixed."""

WARM_UP = 128
"""Rows before a pool that are counted first."""

NOTHING = torch.empty(0)

AHEAD = 24
"""Rows behind a pool that are looked at: .7 ** 24 is a five-thousandth."""


@dataclass(frozen=True)
class ReuseBatch(Batch):
    """Gate inputs in `states`, with fading counts of the past and discounted uses of the future."""

    fading_LBX: Tensor = NOTHING
    """`[L, B, F E]`: the decaying means that the networks see."""
    value_LBE: Tensor = NOTHING
    """Share of the near future in which each expert is used, in [0, 1]."""

    @classmethod
    def of(cls, gate_LBD: Tensor, chosen: Tensor, fading: Tensor, value: Tensor) -> "ReuseBatch":
        return cls(chosen, {TraceSignal.GATE_INPUT: gate_LBD}, fading_LBX=fading, value_LBE=value)

    def to(self, device: torch.device) -> "ReuseBatch":
        moved = [self.gate_LBD, self.chosen_LBK, self.fading_LBX, self.value_LBE]
        return ReuseBatch.of(*(one.to(device) for one in moved))


def future(used_NLE: Floats, gamma: float) -> Floats:
    """`(1 - gamma) / gamma * sum over t > 0 of gamma^t used(row + t)`, rows in order."""
    value_NLE = np.zeros_like(used_NLE)
    for row in range(len(used_NLE) - 2, -1, -1):
        value_NLE[row] = gamma * value_NLE[row + 1] + (1 - gamma) * used_NLE[row + 1]
    return value_NLE


def read_stretch(
    trace: Trace,
    rows_N: NDArray[np.int64],
    first: int,
    last: int,
    routers_LED: Floats,
    biases_LE: Floats,
) -> ReuseBatch:
    """Rows `first..last` of `rows_N`, one request after another as a server without rest runs them.

    A prompt counts token by token, as generated tokens do.
    """
    spec = trace.spec
    start, end = max(0, first - WARM_UP), min(len(rows_N), last + AHEAD)
    rows, layers = rows_N[start:end], range(spec.num_layers)
    gate_LND = np.stack([trace.column(TraceSignal.GATE_INPUT, layer)[rows] for layer in layers])
    gate_LND = gate_LND.astype(np.float32)
    chosen_LNK = np.stack([trace.column(TraceSignal.EXPERTS, layer)[rows] for layer in layers])
    chosen_LNK = chosen_LNK.astype(np.int64)
    used_NLE = np.stack([mark_used(one, spec.num_experts) for one in chosen_LNK], axis=1)
    chance_NLE = np.stack(
        [
            softmax(gate_LND[layer] @ routers_LED[layer].T + biases_LE[layer])
            for layer in range(spec.num_layers)
        ],
        axis=1,
    )
    state_LFE = np.zeros((spec.num_layers, NUM_FADING, spec.num_experts), np.float32)
    inside = slice(first - start, last - start)
    fading = np.empty((last - first, *state_LFE.shape), np.float16)
    for place in range(last - start):
        fade(state_LFE, used_NLE[place], chance_NLE[place])
        if place >= first - start:
            fading[place - (first - start)] = normalize_sums(state_LFE)
    value_NLE = future(used_NLE, GAMMA)[inside]
    return ReuseBatch.of(
        torch.from_numpy(gate_LND[:, inside]),
        torch.from_numpy(chosen_LNK[:, inside]),
        torch.from_numpy(fading.reshape(last - first, spec.num_layers, -1).swapaxes(0, 1)),
        torch.from_numpy(value_NLE.swapaxes(0, 1)),
    )


class ReuseBatches(IterableDataset):
    """Stretches of the trace in random order, their tokens in random order.

    A pass drops what does not fill a batch. `epoch` None: in order, nothing dropped.
    """

    def __init__(
        self,
        trace: Trace,
        part: TraceSubset,
        routers_LED: Floats,
        biases_LE: Floats,
        *,
        batch_size: int,
        seed: int = 0,
        epoch: int | None = None,
    ):
        self._trace, self._rows = trace, subset_rows(trace, part)
        self._routers, self._biases = routers_LED, biases_LE
        self._batch_size, self._seed, self._epoch = batch_size, seed, epoch
        self._starts = np.arange(0, len(self._rows), POOL_ROWS)

    def __len__(self) -> int:
        sizes = np.diff([*self._starts, len(self._rows)])
        if self._epoch is not None:
            return int((sizes // self._batch_size).sum())
        return int((-(-sizes // self._batch_size)).sum())

    def __iter__(self) -> Iterator[ReuseBatch]:
        random = np.random.default_rng([self._seed, self._epoch or 0])
        starts = self._starts if self._epoch is None else random.permutation(self._starts)
        for first in starts.tolist():
            last = min(first + POOL_ROWS, len(self._rows))
            pool = read_stretch(self._trace, self._rows, first, last, self._routers, self._biases)
            order = np.arange(last - first)
            if self._epoch is not None:
                order = random.permutation(order)
                order = order[: len(order) // self._batch_size * self._batch_size]
            for place in range(0, len(order), self._batch_size):
                take = torch.from_numpy(order[place : place + self._batch_size])
                yield ReuseBatch.of(
                    pool.gate_LBD[:, take],
                    pool.chosen_LBK[:, take],
                    pool.fading_LBX[:, take].float(),
                    pool.value_LBE[:, take],
                )


class ReuseData(EpochData):
    """Training and validation batches in the order and with the counts that `reuse` needs."""

    def __init__(
        self,
        trace: Trace,
        routers_LED: Floats,
        biases_LE: Floats,
        *,
        batch_size: int,
        seed: int,
    ):
        super().__init__()
        self._trace, self._routers, self._biases = trace, routers_LED, biases_LE
        self._batch_size, self._seed = batch_size, seed

    def _batches(self, part: TraceSubset, epoch: int | None) -> ReuseBatches:
        return ReuseBatches(
            self._trace,
            part,
            self._routers,
            self._biases,
            batch_size=self._batch_size,
            seed=self._seed,
            epoch=epoch,
        )

    def batches(self, epoch: int) -> ReuseBatches:
        return self._batches(TraceSubset.FIT, epoch)

    def validation(self) -> ReuseBatches:
        return self._batches(TraceSubset.VALIDATION, None)
