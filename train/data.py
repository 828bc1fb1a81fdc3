"""Batches from a memory-mapped trace, which is never loaded whole.

Shape suffixes: L layers, B batch, N rows read, D hidden size, K top_k, G decays.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import KW_ONLY, dataclass, field
from enum import StrEnum

import numpy as np
import torch
from lightning.pytorch import LightningDataModule
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from collect.traces import Trace, TraceSignal
from collect.traces.columns import Column
from collect.traces.layout import Split
from predictors.base import Floats, Ints
from train.errors import TrainError

BLOCK_ROWS = 256
"""Rows read together. Neighbours are of one request; blocks are far larger than a disk page and
far smaller than a pool, in which they are mixed with blocks from everywhere."""

POOL_BYTES = 256 << 20
"""Memory for the rows among which a batch is drawn."""

VALIDATION_SHARE = 20
"""One training request in this many is for validation: it decides when to stop and sets the
temperatures, so that the held-out requests decide nothing and only measure."""


class TraceSubset(StrEnum):
    """Use of a request. `held_out` is the trace's split; the others divide its `train` split."""

    FIT = "fit"
    VALIDATION = "validation"
    HELD_OUT = "held_out"


def subset_rows(trace: Trace, part: TraceSubset) -> NDArray[np.int64]:
    """Return the row numbers of a subset, ascending.

    It is split by request, never by token: a split by token leaks.
    """
    if part is TraceSubset.HELD_OUT:
        return trace.rows("held_out")
    train = [request.index for request in trace.request_table if request.split is Split.TRAIN]

    # By digest, so that a request's part does not depend on what else the trace holds.
    def order(index: int) -> str:
        digest = trace.request_table[index].digest
        return hashlib.sha256(f"validation {digest}".encode()).hexdigest()

    num_kept = max(1, len(train) // VALIDATION_SHARE) if len(train) > 1 else 0
    kept = np.zeros(len(trace.request_table), dtype=bool)
    kept[sorted(train, key=order)[:num_kept]] = True
    if part is TraceSubset.FIT:
        kept[train] = ~kept[train]
    return np.flatnonzero(kept[trace.requests])


def hold_out_unlearned(other: Trace, trace: Trace, *, key: str) -> Trace:
    """Return `other` with all requests held out but those that a training on `trace` learns from.

    Raises:
        TrainError: it has no others; the message names the option `key`.
    """
    learned = {one.digest for one in trace.request_table if one.split is Split.TRAIN}
    divided = copy(other)
    divided.request_table = [
        one.model_copy(update={"split": Split.TRAIN if one.digest in learned else Split.HELD_OUT})
        for one in other.request_table
    ]
    if not len(divided.rows("held_out")):
        raise TrainError(
            f"the training learns from every request of {key}={other.where}: name a trace of "
            "other prompts"
        )
    return divided


def require_requests(trace: Trace) -> None:
    """Check that there are requests to train on, to validate with and to measure on.

    Raises:
        TrainError: the trace has too few; which are held out depends on their content.
    """
    counts = {
        part: len(np.unique(trace.requests[subset_rows(trace, part)])) for part in TraceSubset
    }
    if not all(counts.values()):
        raise TrainError(
            f"the trace {trace.where} has too few requests: {counts[TraceSubset.FIT]} to train on, "
            f"{counts[TraceSubset.VALIDATION]} for validation, {counts[TraceSubset.HELD_OUT]} held "
            "out (about one in ten), where each needs one at least. Collect more "
            "(data.num_prompts=...), or let the server that records them go on"
        )


@dataclass
class Batch:
    """The same B tokens at every layer. Not frozen: Lightning moves its tensors to the device."""

    chosen_LBK: Tensor
    """Experts that each layer's router chose, int64."""
    states: Mapping[str, Tensor]
    """`[L, B, D]` of each requested signal, float32; `reuse` adds means and values of its own."""
    contexts: Mapping[str, Tensor] = field(default_factory=dict)
    """`[G, L, B, D]`: decaying means of the request's earlier states, if requested."""
    weight_GB: Tensor | None = None
    """Sum of the weights in `read_contexts`: 0 for a request's first token, soon 1."""

    @property
    def gate_LBD(self) -> Tensor:
        return self.states[TraceSignal.GATE_INPUT]


@dataclass(frozen=True)
class InputSpec:
    """Inputs that networks read from a trace, in addition to the chosen experts."""

    signals: frozenset[str] = frozenset({TraceSignal.GATE_INPUT})
    decays: tuple[float, ...] = ()
    """Decays of the contexts; empty: no contexts."""


@dataclass(frozen=True)
class Pool:
    """Rows in memory, states in half precision as they are stored."""

    chosen_LNK: Ints
    states: Mapping[str, NDArray]
    contexts: Mapping[str, NDArray] = field(default_factory=dict)
    weight_GN: Floats | None = None

    def batch(self, take: NDArray[np.int64]) -> Batch:
        def tensor(array: NDArray) -> Tensor:
            return torch.from_numpy(array[..., take, :].astype(np.float32))

        return Batch(
            torch.from_numpy(self.chosen_LNK[:, take]),
            {signal: tensor(state) for signal, state in self.states.items()},
            {signal: tensor(context) for signal, context in self.contexts.items()},
            None if self.weight_GN is None else torch.from_numpy(self.weight_GN[:, take]),
        )


def read_pool(trace: Trace, rows_N: NDArray[np.int64], needs: InputSpec) -> Pool:
    """Read the signals and contexts of these ascending rows into memory."""
    chosen_LNK = read_layers(trace, TraceSignal.EXPERTS, rows_N).astype(np.int64)
    states: dict[str, NDArray] = {}
    past: dict[str, NDArray] = {}
    weight_GN = None
    for signal in sorted(needs.signals):
        states[signal] = read_layers(trace, signal, rows_N)
        if needs.decays:
            columns = [trace.column(signal, layer) for layer in range(trace.spec.num_layers)]
            past[signal], weight_GN = read_contexts(
                columns, rows_N, requests=trace.requests, decays=needs.decays
            )
    return Pool(chosen_LNK, states, past, weight_GN)


def read_layers(trace: Trace, signal: str, rows_N: NDArray[np.int64]) -> NDArray:
    """Read these rows of a signal at every layer, `[L, N, ...]`."""
    layers = range(trace.spec.num_layers)
    return np.stack([trace.column(signal, layer)[rows_N] for layer in layers])


def shuffle_rows(
    rows: NDArray[np.int64], *, pool_rows: int, seed: int, epoch: int
) -> Iterator[Ints]:
    """Yield pools of rows: blocks in random order, then rows in random order within each pool.

    The order depends on seed and epoch alone, so that a resumed run sees the same batches.
    """
    random = np.random.default_rng([seed, epoch])
    starts = random.permutation(np.arange(0, len(rows), BLOCK_ROWS))
    mixed = np.concatenate([rows[start : start + BLOCK_ROWS] for start in starts])
    for first in range(0, len(mixed), pool_rows):
        yield random.permutation(mixed[first : first + pool_rows])


@dataclass(eq=False)
class TraceBatches(IterableDataset):
    """Batches of a trace; in training the last, smaller one is dropped, so that steps are alike."""

    trace: Trace
    part: TraceSubset
    _: KW_ONLY
    batch_size: int
    needs: InputSpec = InputSpec()
    seed: int = 0
    epoch: int | None = None
    """None: in the trace's order, nothing dropped (evaluation)."""
    pool_bytes: int = POOL_BYTES
    share: tuple[int, int] = (0, 1)
    """The number of this device and how many there are; each takes every so manyth of a batch's
    tokens."""

    def __post_init__(self) -> None:
        self._rows = subset_rows(self.trace, self.part)
        if self.epoch is not None and not len(self):
            raise TrainError(
                f"the trace has {len(self._rows):,} tokens to train on, a batch "
                f"{self.batch_size:,}: collect more (data.num_prompts=...) or give a smaller "
                "batch_size"
            )

    @property
    def pool_rows(self) -> int:
        """Rows of a pool, whole batches; with the seed, they decide which rows meet."""
        copies, spec = len(self.needs.signals) * (1 + len(self.needs.decays)), self.trace.spec
        row_bytes = spec.num_layers * (2 * spec.hidden_size * copies + 8 * spec.top_k)
        return max(1, self.pool_bytes // row_bytes // self.batch_size) * self.batch_size

    def __len__(self) -> int:
        sizes = np.diff([*range(0, len(self._rows), self.pool_rows), len(self._rows)])
        rest = 0 if self.epoch is not None else self.batch_size - 1
        return int(((sizes + rest) // self.batch_size).sum())

    def __iter__(self) -> Iterator[Batch]:
        number, devices = self.share
        for pool, order in self._pools():
            for first in range(0, len(order), self.batch_size):
                take = order[first : first + self.batch_size]
                if self.epoch is None or len(take) == self.batch_size:
                    yield pool.batch(take[number::devices])

    def _pools(self) -> Iterator[tuple[Pool, Ints]]:
        """Yield each pool with the order in which its rows are taken."""
        size = self.pool_rows
        pools: Iterable[Ints] = (
            (self._rows[first : first + size] for first in range(0, len(self._rows), size))
            if self.epoch is None
            else shuffle_rows(self._rows, pool_rows=size, seed=self.seed, epoch=self.epoch)
        )
        for rows in pools:
            # Ascending: the pages of a block are touched once; then back to the random order.
            order = np.argsort(rows)
            yield read_pool(self.trace, rows[order], self.needs), np.argsort(order)


class EpochData(LightningDataModule):
    """Training batches in an order set by seed and epoch, and validation batches.

    Args:
        make: Returns the batches of a subset; of an epoch with this device's share, if given both.
    """

    def __init__(self, make: Callable[..., TraceBatches]):
        super().__init__()
        self._make = make

    def batches(self, epoch: int) -> TraceBatches:
        """Return one epoch of the requests that are trained on."""
        share = (0, 1)
        if self.trainer is not None:
            share = (self.trainer.global_rank, self.trainer.world_size)
        return self._make(TraceSubset.FIT, epoch=epoch, share=share)

    def validation(self) -> TraceBatches:
        """Return the requests that decide when to stop, in the trace's order."""
        return self._make(TraceSubset.VALIDATION)

    def train_dataloader(self) -> DataLoader:
        # Called for each epoch (reload_dataloaders_every_n_epochs=1).
        assert self.trainer is not None
        return DataLoader(self.batches(self.trainer.current_epoch), batch_size=None)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(self.validation(), batch_size=None)


WARM_UP = 24
"""Rows read before the first of a run: at a decay of .8 what came before them weighs .005."""


def read_contexts(
    columns: Sequence[Column],
    rows_N: NDArray[np.int64],
    *,
    requests: NDArray[np.int32],
    decays: Sequence[float],
) -> tuple[NDArray[np.float16], Floats]:
    """Returns `([G, L, N, D], [G, N])`: the contexts of the rows and the sums of their weights.

    A context is `(1 - d) sum over j of d^j x(t - 1 - j)` over the request's earlier rows, for each
    decay d. `rows_N` ascends; there is a column for each layer.
    """
    width = columns[0].shape[1]
    contexts = np.zeros((len(decays), len(columns), len(rows_N), width), np.float16)
    weight_GN = np.zeros((len(decays), len(rows_N)), np.float32)
    # Places of rows that follow each other within one request.
    breaks = np.flatnonzero((np.diff(rows_N) != 1) | (np.diff(requests[rows_N]) != 0)) + 1
    for run in np.split(np.arange(len(rows_N)), breaks):
        row, last = rows_N[run[[0, -1]]].tolist()
        start = max(row - WARM_UP, int(np.searchsorted(requests, requests[row])))
        past = np.stack([column[start:last] for column in columns], axis=1)
        # The row at `start` has no past that is looked at; row t has the mean over those before.
        for g, decay in enumerate(decays):
            mean_TLD, weight_T = decaying_means(past.astype(np.float32), decay)
            contexts[g][:, run] = mean_TLD[row - start :].swapaxes(0, 1)
            weight_GN[g, run] = weight_T[row - start :]
    return contexts, weight_GN


def decaying_means(past_PLD: Floats, decay: float) -> tuple[Floats, Floats]:
    """`([P + 1, L, D], [P + 1])`: the mean before each row and behind the last, and its weight."""
    num_rows = len(past_PLD)
    mean_TLD = np.zeros((num_rows + 1, *past_PLD.shape[1:]), np.float32)
    weight_T = 1 - np.power(decay, np.arange(num_rows + 1, dtype=np.float32))
    if decay == 0:
        mean_TLD[1:] = past_PLD
        return mean_TLD, weight_T.astype(np.float32)
    for t in range(num_rows):
        np.multiply(past_PLD[t], 1 - decay, out=mean_TLD[t + 1])
        mean_TLD[t + 1] += decay * mean_TLD[t]
    return mean_TLD, weight_T.astype(np.float32)
