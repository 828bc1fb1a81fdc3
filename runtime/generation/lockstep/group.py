"""Start generations, step them together and end them.

With `exact=shared` one forward pass computes the single tokens of several sequences as the rows of
a block (`runtime.hf.row_block`).
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from predictors.base import Ints
from runtime.accelerator import seed_random
from runtime.errors import GroupError
from runtime.generation.lockstep.scheduler import LockstepScheduler
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
        super().__init__(run, random={})
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


class LockstepGroup:
    """Generations of one served model that go through its layers together; a context manager.

    Not thread-safe: one thread makes all calls. Other threads may use the model at the same time;
    their forward passes alternate with the group's.

    Raises:
        GroupError: the model was not loaded by `runtime.load`, or already has a group.
    """

    def __init__(self, model: PreTrainedModel):
        handle = getattr(model, "moecast", None)
        if handle is None:
            raise GroupError("a lockstep group needs a model loaded by runtime.load")
        if isinstance(handle.probes.listener, LockstepScheduler):
            raise GroupError("this model already has a lockstep group; close it first")
        self._device = model.device
        self._handle = handle
        self._scheduler = LockstepScheduler(
            handle.engine, handle.probes, dense_stream=handle.dense_stream
        )
        handle.connect(self._scheduler)
        self._sequences: list[SequenceTask] = []
        self._shared = BlockForward(model, heights) if (heights := handle.block_heights) else None
        """Lets sequences share products; None: each has separate forward passes."""
        self._blocks: list[BlockTask] = []
        """Of the current step."""
        self._alone: set[SequenceTask] = set()
        """Sequences of a block that failed: one of them may be the cause."""
        self._is_closed = False

    @property
    def sequences(self) -> Sequence[SequenceTask]:
        """Tasks that have not ended, in the order in which they were started."""
        return tuple(self._sequences)

    def start(self, run: Callable[[], Any], *, seed: int | None = None) -> SequenceTask:
        """Add a generation, which begins with the next step.

        Args:
            run: calls the model any number of times; runs as a coroutine with gradients off.
            seed: the task draws the random numbers that follow `torch.manual_seed(seed)`,
                independent of other tasks; None uses the thread's generator.
        """
        if self._is_closed:
            raise GroupError("this lockstep group is closed; open a new one")
        random = {} if seed is None else seed_random(seed, self._device)
        sequence = SequenceTask(run, random=random)
        self._sequences.append(sequence)
        return sequence

    def step(self) -> list[SequenceTask]:
        """Run one forward pass of every task together and continue each to its next one.

        Tasks at different parts of a model (an encoder, its decoder) alternate.

        Returns:
            The tasks that have ended.
        """
        with torch.no_grad():
            try:
                for sequence in self._sequences:
                    sequence.is_alone = len(self._sequences) == 1
                    if sequence.pending is None and not sequence.is_done:
                        self._scheduler.run_to_forward_pass(sequence)
                if sequences := self._form_blocks(self._select_tasks()):
                    self._scheduler.run_forward_pass(sequences)
                    for sequence in sequences:
                        if not sequence.is_done:
                            self._scheduler.run_to_forward_pass(sequence)
                while self._blocks:
                    self._end_block(self._blocks.pop())
            except BaseException:
                self.close()  # the other tasks are in an unknown state and cannot continue
                raise
        return self._remove_ended()

    def _select_tasks(self) -> list[SequenceTask]:
        waiting = [s for s in self._sequences if s.is_at(-1, SyncPoint.FORWARD_PASS)]
        if not waiting:
            return []
        part = max(waiting, key=lambda sequence: sequence.num_steps_waited).lane.part
        for sequence in waiting:
            is_selected = sequence.lane.part == part
            sequence.num_steps_waited = 0 if is_selected else sequence.num_steps_waited + 1
        return [sequence for sequence in waiting if sequence.lane.part == part]

    def _form_blocks(self, sequences: Sequence[SequenceTask]) -> Sequence[SequenceTask]:
        """Return what goes through the layers: blocks of sequences, and the other sequences."""
        if self._shared is None:
            return sequences
        tasks = list(form_blocks(self._shared, sequences, alone=self._alone))
        self._alone.clear()
        self._blocks = [task for task in tasks if isinstance(task, BlockTask)]
        for block in self._blocks:
            self._scheduler.run_to_forward_pass(block)
        return [task for task in tasks if not task.is_done]

    def _end_block(self, block: BlockTask) -> None:
        """Give a block's outputs to its members; after an error each repeats the step alone."""
        if block.error is None:
            for member, output in zip(block.members, block.result, strict=True):
                self._scheduler.run_to_forward_pass(member, output)
        elif len(block.members) > 1:
            self._alone.update(block.members)
        else:
            self._scheduler.fail(block.members, block.error)

    def _remove_ended(self) -> list[SequenceTask]:
        ended = [sequence for sequence in self._sequences if sequence.is_done]
        self._sequences = [sequence for sequence in self._sequences if not sequence.is_done]
        return ended

    def cancel(self, sequence: SequenceTask) -> None:
        """End a task now; only between two steps."""
        with torch.no_grad():
            sequence.cancel()
        self._remove_ended()

    def close(self) -> None:
        """Cancel all tasks and give the model back its engine. May be called twice."""
        if self._is_closed:
            return
        self._is_closed = True
        for sequence in (*self._blocks, *self._sequences):
            self.cancel(sequence)
        if self._shared is not None:
            self._shared.remove()
        self._handle.connect(self._scheduler.engine)

    def __enter__(self) -> "LockstepGroup":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()
