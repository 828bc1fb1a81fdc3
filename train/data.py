"""Batches from a memory-mapped trace, which is never loaded whole.

Shape suffixes: L layers, B batch, D hidden size, K top_k.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from lightning.pytorch import LightningDataModule
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from collect.traces import Trace, TraceSignal
from predictors.base import Floats, Ints
from train.errors import TrainError

BLOCK_ROWS = 256
"""Rows read together. Neighbours are of one request; blocks are far larger than a disk page and
far smaller than a pool, in which they are mixed with blocks from everywhere."""

POOL_BYTES = 256 << 20
"""Memory for the rows among which a batch is drawn."""


class Batch(NamedTuple):
    """The same B tokens at every layer."""

    hidden_LBD: Tensor
    """Gate inputs, float32."""
    chosen_LBK: Tensor
    """Experts that each layer's router chose, int64."""


def read_rows(trace: Trace, rows: NDArray[np.int64]) -> tuple[Floats, Ints]:
    """Gate inputs `[L, B, D]` (half precision, as stored) and chosen experts `[L, B, K]`."""
    layers = range(trace.spec.num_layers)
    hidden = np.stack([trace.column(TraceSignal.GATE_INPUT, layer)[rows] for layer in layers])
    chosen = np.stack([trace.column(TraceSignal.EXPERTS, layer)[rows] for layer in layers])
    return hidden, chosen.astype(np.int64)


def shuffled(rows: NDArray[np.int64], *, pool_rows: int, seed: int, epoch: int) -> Iterator[Ints]:
    """Pools of rows: blocks in random order, then rows in random order within each pool.

    The order depends on seed and epoch alone, so that a resumed run sees what it would have seen.
    """
    random = np.random.default_rng([seed, epoch])
    starts = random.permutation(np.arange(0, len(rows), BLOCK_ROWS))
    mixed = np.concatenate([rows[start : start + BLOCK_ROWS] for start in starts])
    for first in range(0, len(mixed), pool_rows):
        yield random.permutation(mixed[first : first + pool_rows])


class TraceBatches(IterableDataset):
    """Whole batches; a training pass drops the last, smaller one, so that steps are alike."""

    def __init__(
        self,
        trace: Trace,
        split: str,
        *,
        batch_size: int,
        seed: int = 0,
        epoch: int | None = None,
        pool_bytes: int = POOL_BYTES,
    ):
        """`epoch` None: in the trace's order, nothing dropped (evaluation)."""
        self._trace = trace
        self._rows = trace.rows(split)
        self._batch_size = batch_size
        self._seed = seed
        self._epoch = epoch
        spec = trace.spec
        row_bytes = spec.num_layers * (2 * spec.hidden_size + 8 * spec.top_k)
        self._pool_rows = max(1, pool_bytes // row_bytes // batch_size) * batch_size
        if epoch is not None and len(self._rows) < batch_size:
            raise TrainError(
                f"the trace has {len(self._rows):,} tokens to train on, a batch {batch_size:,}: "
                "collect more (data.num_prompts=...) or give a smaller batch_size"
            )
        if not len(self._rows):
            raise TrainError(
                f"the trace has no {split} requests: collect more (data.num_prompts=...)"
            )

    def __len__(self) -> int:
        full, rest = divmod(len(self._rows), self._batch_size)
        return full + (rest > 0 and self._epoch is None)

    def __iter__(self) -> Iterator[Batch]:
        for pool in self._pools():
            # Ascending: the pages of a block are touched once; then back to the random order.
            order = np.argsort(pool)
            hidden, chosen = read_rows(self._trace, pool[order])
            places = np.argsort(order)
            for first in range(0, len(pool), self._batch_size):
                take = places[first : first + self._batch_size]
                if self._epoch is not None and len(take) < self._batch_size:
                    return
                yield Batch(
                    torch.from_numpy(hidden[:, take].astype(np.float32)),
                    torch.from_numpy(chosen[:, take]),
                )

    def _pools(self) -> Iterator[Ints]:
        if self._epoch is not None:
            pools = shuffled(
                self._rows, pool_rows=self._pool_rows, seed=self._seed, epoch=self._epoch
            )
            yield from pools
        else:
            for first in range(0, len(self._rows), self._pool_rows):
                yield self._rows[first : first + self._pool_rows]


class TraceData(LightningDataModule):
    """Training and held-out batches of one trace; a pass's order is set by seed and epoch."""

    def __init__(self, trace: Trace, *, batch_size: int, seed: int):
        super().__init__()
        self._trace = trace
        self._batch_size = batch_size
        self._seed = seed

    def batches(self, epoch: int) -> TraceBatches:
        """One pass over the training requests."""
        return TraceBatches(
            self._trace, "train", batch_size=self._batch_size, seed=self._seed, epoch=epoch
        )

    def train_dataloader(self) -> DataLoader:
        # Asked anew for each pass (reload_dataloaders_every_n_epochs=1).
        assert self.trainer is not None
        return DataLoader(self.batches(self.trainer.current_epoch), batch_size=None)

    def val_dataloader(self) -> DataLoader:
        held_out = TraceBatches(self._trace, "held_out", batch_size=self._batch_size)
        return DataLoader(held_out, batch_size=None)
