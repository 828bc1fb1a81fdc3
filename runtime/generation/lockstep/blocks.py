"""Blocks of sequences whose single tokens one forward pass computes (`runtime.hf.row_block`)."""

from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from predictors.base import Ints
from runtime.generation.lockstep.sequence import (
    SequenceTask,
    SyncPoint,
    Yield,
    current_sequence,
    yield_until_resumed,
)
from runtime.hf.forward_pass import ForwardReplacement
from runtime.hf.probes import to_ints
from runtime.hf.row_block import DecodeStep, compute_block, read_decode_step

Forward = Callable[..., Any]


class BlockTask(SequenceTask):
    """The forward pass of a block, which goes through the layers as one sequence.

    It begins no requests: its tokens are those of its members' requests.

    Args:
        members: wait with a `DecodeStep` each.
    """

    def __init__(self, model: "BlockForward", members: Sequence[SequenceTask]):
        steps = [read_pending_step(member) for member in members]
        run = partial(compute_block, model.forward, steps, model.heights)
        super().__init__(run, random=None)
        self.members = members
        self.num_rows = len(members)
        self._tokens_T = to_ints(torch.cat([step.token_11 for step in steps])).ravel()
        self._requests_T = to_ints(
            torch.tensor([[member.lane.first_request] for member in members])
        ).ravel()

    def request_step(self, tokens_T: Ints, requests_T: Ints) -> Yield:
        del tokens_T, requests_T  # of all rows, spare ones too
        return super().request_step(self._tokens_T, self._requests_T)


def read_pending_step(sequence: SequenceTask) -> DecodeStep:
    assert sequence.pending is not None
    assert sequence.pending.decode is not None
    return sequence.pending.decode


class BlockForward(ForwardReplacement):
    """Suspends sequences whose forward pass can be a row of a block, until it was computed.

    Args:
        heights: numbers of rows that a block may have, ascending.
    """

    def __init__(self, model: nn.Module, heights: Sequence[int]):
        self.heights = heights
        self.forward: Forward = model.forward
        """Computes a block."""
        super().__init__(model, self._suspend)

    def _suspend(self, *args: Any, **kwargs: Any) -> Any:
        sequence = current_sequence()
        step = None if sequence is None else read_decode_step(args, kwargs)
        if sequence is None or step is None:
            return self.forward(*args, **kwargs)
        return yield_until_resumed(sequence, Yield(SyncPoint.FORWARD_PASS, decode=step))


def form_blocks(
    model: BlockForward, sequences: Sequence[SequenceTask], *, alone: Collection[SequenceTask]
) -> Iterator[SequenceTask]:
    """Yield blocks of the sequences that wait with a `DecodeStep`, and the other sequences.

    Args:
        alone: sequences that get a block each.
    """
    max_rows = model.heights[-1]
    by_options: dict[tuple, list[SequenceTask]] = {}
    for sequence in sequences:
        if sequence.pending is None or sequence.pending.decode is None:
            yield sequence
        elif sequence in alone:
            yield BlockTask(model, [sequence])
        else:
            options = tuple(sorted(sequence.pending.decode.options.items()))
            by_options.setdefault(options, []).append(sequence)
    for members in by_options.values():
        for start in range(0, len(members), max_rows):
            yield BlockTask(model, members[start : start + max_rows])
