"""Batch after batch through a group: `n` of them at a time, the next as soon as one has ended."""

import logging
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from transformers import PreTrainedModel

from runtime.errors import TransferError
from runtime.generation.batch.generation import Ended, generate_batch
from runtime.generation.batch.journal import Result
from runtime.generation.batch.prompts import Id, Prompt
from runtime.generation.batch.rows import Batch
from runtime.generation.kv.caches import Caches
from runtime.generation.lockstep import LockstepGroup, SequenceTask

log = logging.getLogger(__name__)

SEEDS = 1_000_003
"""Between the seeds of two runs: each batch draws by a seed of its own."""


@dataclass
class Ran:
    """What a run of batches came to."""

    num_steps: int = 0
    num_rows: int = 0
    """Results emitted."""
    num_tokens: int = 0
    """New ones of these."""
    failed: list[tuple[Batch, str]] = field(default_factory=list)
    """Batches that ended in an error of a transfer, and which."""


def run_batches(
    model: PreTrainedModel,
    batches: Sequence[Batch],
    *,
    n: int,
    caches: Caches,
    emit: Callable[[Result], None],
    text: Callable[[list[int]], str] | None = None,
    done: Collection[Id] = (),
    temperature: float = 0.0,
    seed: int = 0,
) -> Ran:
    """Runs all batches of which a row is not in `done`, and emits the other rows as they end.

    A batch runs whole, so that its rows have the bits that they have without an interruption.
    A batch whose transfers fail is left out, the others go on.
    """
    ran = Ran()

    def ended(prompt: Prompt, tokens: list[int], reason: str) -> None:
        if prompt.id not in done:
            ran.num_rows += 1
            ran.num_tokens += len(tokens)
            emit(Result(prompt.id, text(tokens) if text else None, tokens, reason))

    waiting = deque(
        (place, batch)
        for place, batch in enumerate(batches)
        if any(one.id not in done for one in batch)
    )
    living: dict[SequenceTask, Batch] = {}
    group = LockstepGroup(model)
    try:
        while waiting or living:
            while waiting and len(living) < n:
                place, batch = waiting.popleft()
                # Random numbers of its own take time at every stop: only who draws any has them.
                own = seed * SEEDS + place if temperature > 0 else None
                member = group.start(_run(model, batch, caches, ended, temperature), seed=own)
                living[member] = batch
            for member in group.step():
                batch = living.pop(member)
                if isinstance(member.error, TransferError):
                    log.error("a batch of %d prompts is left out: %s", len(batch), member.error)
                    ran.failed.append((batch, str(member.error)))
                elif member.error is not None:
                    raise member.error
            ran.num_steps += 1
    finally:
        group.close()
    return ran


def _run(
    model: PreTrainedModel, batch: Batch, caches: Caches, ended: Ended, temperature: float
) -> Callable[[], None]:
    def run() -> None:
        generate_batch(model, batch, caches=caches, ended=ended, temperature=temperature)

    return run
