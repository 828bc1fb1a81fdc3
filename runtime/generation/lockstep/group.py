"""Start generations, step them together and end them."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from runtime.errors import GroupError
from runtime.generation.lockstep.blocks import BlockForward, BlockTask, form_blocks
from runtime.generation.lockstep.scheduler import LockstepScheduler
from runtime.generation.lockstep.sequence import SeededRandom, SequenceTask, SyncPoint


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
        sequence = SequenceTask(
            run, random=None if seed is None else SeededRandom(seed, self._device)
        )
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
            self._scheduler.fail_forward_pass(block.members[0], block.error)

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
