"""Batches of a trace whose rows depend on the rows before and behind them, as a server runs them.

Neighbouring rows are read and computed together, as a stretch; its rows are then mixed.
"""

from collections.abc import Callable, Iterator
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import IterableDataset

from collect.traces import Trace
from train.data import Batch, EpochData, TraceSubset, subset_rows
from train.errors import TrainError

STRETCH_ROWS = 4_096
"""Rows of a stretch."""


class Stretch(Protocol):
    """Rows in memory, of which batches are made."""

    def take(self, rows: Tensor) -> Batch: ...


ReadStretch = Callable[[NDArray[np.int64], int, int], Stretch]
"""Makes a stretch of rows of the trace, of which those from the second to the third argument."""


class StretchBatches(IterableDataset):
    """Stretches of the trace in random order, their tokens in random order.

    A pass drops what does not fill a batch. `epoch` None: in order, nothing dropped.
    """

    def __init__(
        self,
        trace: Trace,
        part: TraceSubset,
        read: ReadStretch,
        *,
        batch_size: int,
        seed: int = 0,
        epoch: int | None = None,
    ):
        self._rows, self._read = subset_rows(trace, part), read
        self._batch_size, self._seed, self._epoch = batch_size, seed, epoch
        self._starts = np.arange(0, len(self._rows), STRETCH_ROWS)
        if epoch is not None and not len(self):
            raise TrainError(
                f"the trace has {len(self._rows):,} tokens to train on, a batch {batch_size:,}: "
                "collect more (data.num_prompts=...) or give a smaller batch_size"
            )

    def __len__(self) -> int:
        sizes = np.diff([*self._starts, len(self._rows)])
        if self._epoch is not None:
            return int((sizes // self._batch_size).sum())
        return int((-(-sizes // self._batch_size)).sum())

    def __iter__(self) -> Iterator[Batch]:
        random = np.random.default_rng([self._seed, self._epoch or 0])
        starts = self._starts if self._epoch is None else random.permutation(self._starts)
        for first in starts.tolist():
            last = min(first + STRETCH_ROWS, len(self._rows))
            stretch = self._read(self._rows, first, last)
            order = np.arange(last - first)
            if self._epoch is not None:
                order = random.permutation(order)
                order = order[: len(order) // self._batch_size * self._batch_size]
            for place in range(0, len(order), self._batch_size):
                yield stretch.take(torch.from_numpy(order[place : place + self._batch_size]))


class StretchData(EpochData):
    """Training and validation batches in the order of the trace's stretches."""

    def __init__(self, trace: Trace, read: ReadStretch, *, batch_size: int, seed: int):
        super().__init__()
        self._trace, self._read = trace, read
        self._batch_size, self._seed = batch_size, seed

    def _batches(self, part: TraceSubset, epoch: int | None) -> StretchBatches:
        return StretchBatches(
            self._trace,
            part,
            self._read,
            batch_size=self._batch_size,
            seed=self._seed,
            epoch=epoch,
        )

    def batches(self, epoch: int) -> StretchBatches:
        return self._batches(TraceSubset.FIT, epoch)

    def validation(self) -> StretchBatches:
        return self._batches(TraceSubset.VALIDATION, None)
