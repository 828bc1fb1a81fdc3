"""Generate for many prompts at the highest throughput."""

import logging
from collections.abc import Callable, Iterable
from typing import Any

from transformers import PreTrainedModel

from runtime.config import AUTO, StoreConfig
from runtime.errors import TransferError
from runtime.generation.batch.dense_placement import stream_dense_weights
from runtime.generation.batch.memory_plan import make_kv_caches, parse_kv_budget, plan_batches
from runtime.generation.batch.micro_batches import run_micro_batches
from runtime.generation.batch.prompts import (
    find_tokenizer,
    make_batches,
    make_decoder,
    make_prompt_encoder,
    parse_prompts,
)
from runtime.generation.batch.result_journal import BatchResult
from runtime.generation.config import DensePlacement, GroupConfig, Offload

log = logging.getLogger(__name__)


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
        PromptFileError: a prompt is invalid; nothing was run.
        PlanError: KV caches would not fit.
        TransferError: experts could not be read; `on_result` received all other results.
    """
    for name, values in {"kv_offload": Offload, "dense": DensePlacement}.items():
        if name in options:
            options[name] = values(options[name])
    config = GroupConfig(n=str(n), **options)
    tokenizer = find_tokenizer(model.moecast.folder)
    encoder = make_prompt_encoder(model.config, tokenizer)
    given = parse_prompts(prompts, encoder, max_new_tokens=config.max_new_tokens)
    if not given:
        return []
    batches = make_batches(given, config.batch_size)
    group, kv_budget = config.asked_n, parse_kv_budget(config, model.device)
    with_gates = False
    if group is None:
        made = plan_batches(model, batches, config, store=StoreConfig())
        group, kv_budget = made.plan.n, made.kv_budget
        with_gates = made.measured.costs.calls_gates
        for note in made.plan.notes:
            log.warning(note)
    results: dict[Any, BatchResult] = {}

    def emit(result: BatchResult) -> None:
        results[result.id] = result
        if on_result is not None:
            on_result(result)

    caches = make_kv_caches(model, config, kv_budget)
    stream = None
    try:
        if config.dense is DensePlacement.STREAM:
            stream = stream_dense_weights(model, StoreConfig(), with_gates=with_gates)
        ran = run_micro_batches(
            model,
            batches,
            n=group,
            caches=caches,
            emit=emit,
            text=make_decoder(tokenizer),
            temperature=config.temperature,
            seed=seed,
        )
    finally:
        caches.close()
        if stream is not None:
            model.moecast.dense_stream = None
            stream.close()
    if ran.failed:
        raise TransferError(
            f"{len(given) - len(results)} of {len(given)} prompts failed: {ran.failed[0][1]}"
        )
    return [results[prompt.id] for prompt in given]
