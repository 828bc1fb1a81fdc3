"""Generate for many prompts: groups of batches in lockstep, each row reported when it ends.

A group holds `n` batches at a time (Klotski, section 5); the next batch starts when one has ended.
"""

import logging
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, StoppingCriteria, StoppingCriteriaList

from predictors.errors import MoecastError
from runtime.config import AUTO, StoreConfig
from runtime.errors import StepMemoryError, TransferError
from runtime.generation.batch.cost_profile import load_or_measure
from runtime.generation.batch.dense_placement import stream_dense_weights
from runtime.generation.batch.memory_plan import make_kv_caches, parse_kv_budget, plan_run
from runtime.generation.batch.prompts import (
    Batch,
    BatchPrompt,
    PromptEncoder,
    PromptId,
    find_tokenizer,
    make_batches,
    max_cache_length,
    parse_prompts,
)
from runtime.generation.batch.result_journal import BatchResult
from runtime.generation.config import DensePlacement, GroupConfig, Offload
from runtime.generation.kv_caches import KVCacheFactory
from runtime.generation.lockstep.group import LockstepGroup
from runtime.generation.lockstep.sequence import SequenceTask
from runtime.generation.sampling import drawing_options
from runtime.hf.model_faults import check_generates
from runtime.hf.tokens import eos_token_ids, pad_batch, pad_token_id

log = logging.getLogger(__name__)

STOP, LENGTH = "stop", "length"

OnRowEnd = Callable[[BatchPrompt, list[int], str], None]
"""`(prompt, new tokens, finish reason)`."""


class RowStoppingCriteria(StoppingCriteria):
    """Ends each row at its own limit and reports it to `ended` while the others continue."""

    def __init__(self, batch: Batch, ends: Collection[int], ended: OnRowEnd):
        self._batch = batch
        self._ends = frozenset(ends)
        # Transformers looks for an attribute of this name to learn that rows may end early: it
        # then pads them.
        self.eos_token_id = sorted(self._ends)
        self._ended = ended
        self._start: int | None = None
        self.is_over = [False] * len(batch)

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        del scores, kwargs
        if self._start is None:
            self._start = input_ids.shape[1] - 1
        count = input_ids.shape[1] - self._start
        for row, last in enumerate(input_ids[:, -1].tolist()):
            if self.is_over[row]:
                continue
            prompt = self._batch[row]
            if last in self._ends or count >= prompt.max_new_tokens:
                self.is_over[row] = True
                reason = STOP if last in self._ends else LENGTH
                self._ended(prompt, input_ids[row, self._start :].tolist(), reason)
        return torch.tensor(self.is_over, device=input_ids.device)


def generate_batch(
    model: PreTrainedModel,
    batch: Batch,
    *,
    caches: KVCacheFactory,
    ended: OnRowEnd,
    temperature: float = 0.0,
) -> None:
    """Generate with the model's own `generate` until the last row has ended."""
    is_decoder = not model.config.is_encoder_decoder
    tokens_BT, mask_BT = pad_batch(
        [prompt.tokens for prompt in batch], pad_token_id(model), left=is_decoder
    )
    padding_B = (1 - mask_BT).sum(dim=1)
    cache = caches.make(padding_B, max_cache_length=max_cache_length(batch))
    rows = RowStoppingCriteria(batch, eos_token_ids(model), ended)
    options = drawing_options(temperature)
    if cache is not None:
        options["past_key_values"] = cache
    try:
        model.generate(
            tokens_BT.to(model.device),
            attention_mask=mask_BT.to(model.device),
            max_new_tokens=max(prompt.max_new_tokens for prompt in batch),
            stopping_criteria=StoppingCriteriaList([rows]),
            pad_token_id=pad_token_id(model),
            **options,
        )
    finally:
        for layer in cache.layers if cache is not None else ():
            layer.close()
    assert all(rows.is_over), "generation ended before its rows did"


SEED_STRIDE = 1_000_003
"""Distance between the seeds of two runs: every batch has its own seed."""


@dataclass
class BatchRunSummary:
    """Counts of a batch run."""

    num_steps: int = 0
    num_rows: int = 0
    """Results emitted."""
    num_tokens: int = 0
    """New tokens of these."""
    failed: list[tuple[Batch, MoecastError]] = field(default_factory=list)
    """Batches that ended in an error of transfers or memory, with it."""


def run_micro_batches(
    model: PreTrainedModel,
    batches: Sequence[Batch],
    *,
    n: int,
    caches: KVCacheFactory,
    emit: Callable[[BatchResult], None],
    decode: Callable[[list[int]], str | None] = lambda _: None,
    done: Collection[PromptId] = (),
    temperature: float = 0.0,
    seed: int = 0,
) -> BatchRunSummary:
    """Run all batches with a row that is not in `done` and emit these rows as they end.

    A batch always runs with all its rows, so that a resumed run produces the same bits. A batch
    whose transfers fail, or for which memory is too small, is skipped; the others continue.

    Args:
        caches: closed at the end.
        decode: the text of new tokens; None for results without text.
    """
    ran = BatchRunSummary()

    def ended(prompt: BatchPrompt, tokens: list[int], reason: str) -> None:
        if prompt.id not in done:
            ran.num_rows += 1
            ran.num_tokens += len(tokens)
            emit(BatchResult(prompt.id, decode(tokens), tokens, reason))

    waiting = deque(
        (place, batch)
        for place, batch in enumerate(batches)
        if any(prompt.id not in done for prompt in batch)
    )
    generate = partial(generate_batch, model, caches=caches, ended=ended, temperature=temperature)
    living: dict[SequenceTask, Batch] = {}
    group = LockstepGroup(model)
    try:
        while waiting or living:
            while waiting and len(living) < n:
                place, batch = waiting.popleft()
                # Swapping random states costs time at every switch: only sampling needs it.
                own = seed * SEED_STRIDE + place if temperature > 0 else None
                living[group.start(partial(generate, batch), seed=own)] = batch
            for member in group.step():
                batch = living.pop(member)
                if isinstance(member.error, TransferError | StepMemoryError):
                    log.error("skipping a batch of %d prompts: %s", len(batch), member.error)
                    ran.failed.append((batch, member.error))
                elif member.error is not None:
                    raise member.error
            ran.num_steps += 1
    finally:
        group.close()
        caches.close()
    return ran


def generate_many(
    model: PreTrainedModel,
    prompts: Iterable[Any],
    *,
    n: int | str = AUTO,
    seed: int = 0,
    on_result: Callable[[BatchResult], None] | None = None,
    **options: Any,
) -> list[BatchResult]:
    """Generate for all prompts; results are in the order of the prompts.

    The batches of a group go through the model's layers together, and each expert is read once for
    all of them. Every batch's logits are bitwise those of the batch alone.

    Args:
        prompts: texts, lists of token ids, lists of messages, or mappings as in the lines of
            `moecast batch`. The default id of a prompt is its index.
        n: batches per group; "auto" measures this machine once and plans.
        on_result: called with each result when its prompt ends, in any order.
        options: the other fields of `runtime.generation.config.GroupConfig`: batch_size,
            max_new_tokens, temperature, kv_budget...

    Raises:
        CheckpointError: the model does not generate token by token.
        PromptFileError: a prompt is invalid; nothing was run.
        PlanError: KV caches would not fit.
        TransferError: experts could not be read; `on_result` received all other results.
        StepMemoryError: the same for memory that was too small.
    """
    for name, values in {"kv_offload": Offload, "dense": DensePlacement}.items():
        if name in options:
            options[name] = values(options[name])
    check_generates(type(model), in_batches=True)
    config = GroupConfig(n=str(n), **options)
    encoder = PromptEncoder(model.config, find_tokenizer(model.moecast.folder))
    given = parse_prompts(prompts, encoder, max_new_tokens=config.max_new_tokens)
    if not given:
        return []
    batches = make_batches(given, config.batch_size)
    group, kv_budget = config.asked_n, parse_kv_budget(config, model.device)
    with_gates = False
    if group is None:
        measured = load_or_measure(model, batches[0], store=StoreConfig())
        made = plan_run(model, batches, config, measured)
        group, kv_budget = made.plan.n, made.kv_budget
        with_gates = measured.costs.calls_gates
        for note in made.plan.notes:
            log.warning(note)
    results: dict[Any, BatchResult] = {}

    def emit(result: BatchResult) -> None:
        results[result.id] = result
        if on_result is not None:
            on_result(result)

    stream = None
    try:
        if config.dense is DensePlacement.STREAM:
            stream = stream_dense_weights(model, StoreConfig(), with_gates=with_gates)
        ran = run_micro_batches(
            model,
            batches,
            n=group,
            caches=make_kv_caches(model, config, kv_budget),
            emit=emit,
            decode=encoder.decode,
            temperature=config.temperature,
            seed=seed,
        )
    finally:
        if stream is not None:
            model.moecast.dense_stream = None
            stream.close()
    if ran.failed:
        error = ran.failed[0][1]
        missing = len(given) - len(results)
        raise type(error)(f"{missing} of {len(given)} prompts failed: {error}") from error
    return [results[prompt.id] for prompt in given]
