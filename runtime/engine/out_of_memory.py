"""Out of memory in a forward pass: how much memory it takes, and a budget that would leave it."""

import re
import traceback
from collections.abc import Callable
from typing import Any

import torch
from transformers import PreTrainedModel

from predictors.units import MIB
from runtime.engine.assembly import size_tiers
from runtime.engine.auto_budget import format_size, measure_free_memory
from runtime.errors import StepMemoryError
from runtime.hf.forward_pass import ForwardReplacement, find_generating_parts, find_tokens
from runtime.hf.kv import count_cache_bytes, estimate_cache_bytes
from runtime.hf.model_faults import is_out_of_memory
from runtime.policy.budget import parse_size

REFUSED = re.compile(r"[Tt]ried to allocate ([\d.]+) (\w?i?B|bytes)")
"""The allocation that PyTorch says has failed."""
RESERVE = 2
"""Times the largest part of a step that is known: what it had asked for when it failed, say, which
it may do again later."""
ROUND_BYTES = 64 * MIB
"""Budgets from here on are named in whole MiB."""


def explain_out_of_memory(model: PreTrainedModel) -> None:
    """Let a served model's forward passes that find no memory end in StepMemoryError."""
    for part in find_generating_parts(model):
        ForwardReplacement(part, explaining(model, part.forward))


def explaining(model: PreTrainedModel, forward: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            return forward(*args, **kwargs)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            raise make_error(model, error, args, kwargs) from error

    return run


def make_error(
    model: PreTrainedModel, error: Exception, args: tuple, kwargs: dict[str, Any]
) -> StepMemoryError:
    """Return the error of a forward pass with these arguments, whose memory is freed."""
    device, (before,) = model.device, measure_free_memory([model.device])
    traceback.clear_frames(error.__traceback__)
    (free,) = measure_free_memory([device])
    num_rows, num_tokens = find_tokens(args, kwargs).shape
    logits = min(num_tokens, kwargs.get("logits_to_keep") or num_tokens)
    largest = max(
        read_refused(error) + max(0, free - before),
        num_rows * num_tokens * count_expert_bytes(model),
        num_rows * logits * model.config.get_text_config().vocab_size * torch.float32.itemsize,
    )
    cached = max(  # what a prompt adds, or as much as there is of a text that grows
        num_rows * estimate_cache_bytes(model.config, num_tokens, model.dtype),
        count_cache_bytes(kwargs.get("past_key_values")),
    )
    needed = RESERVE * largest + cached
    budget = find_fitting_budget(model, needed - free)
    shorter = "a shorter prompt, or fewer answers at a time"
    return StepMemoryError(
        f"out of memory on {device}: a step of {num_rows * num_tokens} tokens takes up to "
        f"{format_size(needed)} next to weights and experts, {format_size(free)} are free. "
        + (f"Take budget={budget}, {shorter}" if budget else f"No budget leaves it; take {shorter}")
    )


def read_refused(error: Exception) -> int:
    """Return the bytes of the allocation that failed; 0 where the error does not say."""
    refused = REFUSED.search(str(error))
    if refused is None:
        return 0
    return parse_size(refused[1] + refused[2].replace("bytes", ""), name="memory")


def count_expert_bytes(model: PreTrainedModel) -> int:
    """Return the bytes that go into and come out of the experts of one token, matrix by matrix."""
    engine, top_k = model.moecast.engine, model.moecast.spec.top_k
    widths = [sum(map(sum, layout.shapes.values())) for layout in engine.store.layouts]
    return top_k * max(widths) * model.dtype.itemsize


def find_fitting_budget(model: PreTrainedModel, missing: int) -> str | None:
    """Return the budget that leaves so many bytes more on the model's own device.

    At least one expert goes. None: what would be left holds no token's experts.
    """
    handle = model.moecast
    engine = handle.engine
    tops = [
        arena
        for arena, link in zip(engine.arenas, engine.loop.links, strict=True)
        if link.tier.is_top
    ]
    has_host = len(engine.arenas) > len(tops)
    needs, _ = size_tiers(engine.store, handle.spec, has_host=has_host)
    here = sum(arena.device == model.device for arena in tops)
    num_gone = max(1, -(-missing * len(tops) // (needs.slot_bytes * here)))
    num_bytes = sum(arena.num_bytes for arena in tops) - num_gone * needs.slot_bytes
    if num_bytes < needs.top_k * needs.slot_bytes * len(tops):
        return None
    num_bytes += needs.scratch_bytes
    return f"{num_bytes // MIB}MiB" if num_bytes >= ROUND_BYTES else str(num_bytes)
