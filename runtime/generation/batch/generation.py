"""One batch: the model's own `generate`, and each row's answer as soon as the row has ended."""

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, StoppingCriteria, StoppingCriteriaList

from runtime.generation.batch.prompts import Prompt
from runtime.generation.batch.rows import Batch, most_tokens, padded
from runtime.generation.kv.caches import Caches

STOP, LENGTH = "stop", "length"

Ended = Callable[[Prompt, list[int], str], None]
"""`(prompt, new tokens, finish reason)`."""


class RowEnds(StoppingCriteria):
    """Ends each row at its own limit, and tells of every row that has ended, while others go on.

    Args:
        ends: the model's end-of-text tokens.
    """

    def __init__(self, batch: Batch, ends: Collection[int], ended: Ended):
        self._batch = batch
        self._ends = frozenset(ends)
        # Under this name Transformers finds out that rows may end before the others: it then puts
        # padding behind them.
        self.eos_token_id = sorted(self._ends)
        self._ended = ended
        self._start: int | None = None
        self._is_over = [False] * len(batch)

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        del scores, kwargs
        if self._start is None:
            self._start = input_ids.shape[1] - 1
        count = input_ids.shape[1] - self._start
        for row, last in enumerate(input_ids[:, -1].tolist()):
            if self._is_over[row]:
                continue
            reason = STOP if last in self._ends else None
            if reason is None and count >= self._batch[row].max_new_tokens:
                reason = LENGTH
            if reason is not None:
                self._is_over[row] = True
                tokens = input_ids[row, self._start :].tolist()
                self._ended(self._batch[row], tokens, reason)
        return torch.tensor(self._is_over, device=input_ids.device)

    @property
    def all_ended(self) -> bool:
        return all(self._is_over)


def generate_batch(
    model: PreTrainedModel,
    batch: Batch,
    *,
    caches: Caches,
    ended: Ended,
    temperature: float = 0.0,
) -> None:
    """Continues the batch's rows until the last has ended."""
    is_decoder = not model.config.is_encoder_decoder
    tokens_BT, mask_BT = padded(batch, pad_id(model), left=is_decoder)
    padding_B = (1 - mask_BT).sum(dim=1)
    cache = caches.make(padding_B, most_tokens=most_tokens(batch))
    rows = RowEnds(batch, end_tokens(model), ended)
    options: dict[str, Any] = {"do_sample": False}
    if temperature > 0:
        options = {"do_sample": True, "temperature": temperature}
    if cache is not None:
        options["past_key_values"] = cache
    try:
        model.generate(
            tokens_BT.to(model.device),
            attention_mask=mask_BT.to(model.device),
            max_new_tokens=max(one.max_new_tokens for one in batch),
            stopping_criteria=StoppingCriteriaList([rows]),
            pad_token_id=pad_id(model),
            **options,
        )
    finally:
        caches.end(cache)
    assert rows.all_ended, "generation ended before its rows did"


def end_tokens(model: PreTrainedModel) -> frozenset[int]:
    """The model's end-of-text tokens, as its generation settings name them."""
    named = model.generation_config.eos_token_id
    if named is None:
        return frozenset()
    return frozenset([named] if isinstance(named, int) else named)


def pad_id(model: PreTrainedModel) -> int:
    """What stands where there is no token; the attention mask hides it."""
    named = model.generation_config.pad_token_id
    if named is None:
        named = getattr(model.config.get_text_config(), "pad_token_id", None)
    if named is None:
        named = min(end_tokens(model), default=0)
    return named
