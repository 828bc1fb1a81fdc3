"""Batches of prompts with similar lengths, to keep padding low."""

from collections.abc import Sequence

from runtime.generation.batch.prompts import BatchPrompt

Batch = tuple[BatchPrompt, ...]


def make_batches(prompts: Sequence[BatchPrompt], batch_size: int) -> list[Batch]:
    """Make batches in the order in which they run.

    The longest come first: a batch that does not fit in memory fails at once, and the last group
    is short. The batches depend on the prompts and `batch_size` alone: padding may change a row's
    last bits, so a resumed run must compute the same batches.
    """
    order = sorted(
        range(len(prompts)),
        key=lambda i: (-len(prompts[i].tokens), -prompts[i].max_new_tokens, i),
    )
    starts = range(0, len(order), batch_size)
    return [tuple(prompts[i] for i in order[at : at + batch_size]) for at in starts]


def max_cache_length(batch: Batch) -> int:
    """Columns of the batch's KV cache when its last row ends."""
    return max(len(one.tokens) for one in batch) + max(one.max_new_tokens for one in batch)


def padding_share(batches: Sequence[Batch]) -> float:
    """Share of padding in all prompt columns."""
    used = sum(len(one.tokens) for batch in batches for one in batch)
    computed = sum(len(batch) * max(len(one.tokens) for one in batch) for batch in batches)
    return 1 - used / computed if computed else 0.0
