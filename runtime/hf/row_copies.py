"""Reference of blocks of rows: Transformers computes a batch of copies of one sequence."""

import copy
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache, PreTrainedModel
from transformers.integrations.moe import ExpertsInterface

from runtime.config import Exact
from runtime.hf.experts import run_own_loop, separate_rows
from runtime.hf.row_block import NUM_ROWS, read_decode_step
from runtime.hf.sharing import choose_heights

IMPLEMENTATION = "moecast_row_loop"


def loop_over_rows(
    module: nn.Module, hidden_TD: Tensor, experts_TK: Tensor, weights_TK: Tensor
) -> Tensor:
    """Run the experts module's own loop, for each row of a batch of copies alone."""
    if not separate_rows.get():
        return run_own_loop(module, hidden_TD, experts_TK, weights_TK)
    rows = zip(hidden_TD.split(1), experts_TK.split(1), weights_TK.split(1), strict=True)
    return torch.cat([run_own_loop(module, *row) for row in rows])


def copy_rows(cache: Cache) -> Cache:
    """Return a KV cache of `NUM_ROWS` copies of a sequence."""
    copies = copy.deepcopy(cache)
    copies.batch_repeat_interleave(NUM_ROWS)
    return copies


def decode_copies(model: PreTrainedModel) -> None:
    """Let a model compute single tokens in a batch of `NUM_ROWS` copies of their sequence.

    Its own attention, masks and KV cache see a batch; prompts are computed as they are.
    """
    forward: Callable[..., Any] = model.forward
    caches: dict[int, tuple[Cache, Cache]] = {}
    """The sequence's cache, with one row until the first single token, and its copies."""

    @functools.wraps(forward)
    def compute_copies(*args: Any, **kwargs: Any) -> Any:
        step = read_decode_step(args, kwargs)
        if step is None:
            return forward(*args, **kwargs)
        known, copies = caches.get(id(step.cache), (None, None))
        if known is not step.cache or copies is None:
            caches.clear()
            copies = copy_rows(step.cache)
            caches[id(step.cache)] = step.cache, copies
        mask = kwargs.get("attention_mask")
        before = separate_rows.set(NUM_ROWS)
        try:
            output = forward(
                input_ids=step.token_11.repeat(NUM_ROWS, 1),
                position_ids=step.position_11.repeat(NUM_ROWS, 1),
                attention_mask=None if mask is None else mask.repeat(NUM_ROWS, 1),
                past_key_values=copies,
                **step.options,
            )
        finally:
            separate_rows.reset(before)
        # Whose length gives the next position.
        for layer, copied in zip(step.cache.layers, copies.layers, strict=True):
            layer.keys, layer.values = copied.keys[:1], copied.values[:1]
            if hasattr(copied, "cumulative_length"):
                layer.cumulative_length = copied.cumulative_length
        return type(output)(logits=output.logits[:1], past_key_values=step.cache)

    model.forward = compute_copies


def set_shared_reference(model: PreTrainedModel) -> Exact:
    """Let a model compute what one that is served with `exact=shared` is compared with.

    Returns:
        The setting in force: `eager` if sequences of this model cannot share products.
    """
    if model.config._experts_implementation == "eager":
        ExpertsInterface.register(IMPLEMENTATION, loop_over_rows)
        model.set_experts_implementation(IMPLEMENTATION)
    if not choose_heights(model, None):
        return Exact.EAGER
    decode_copies(model)
    return Exact.SHARED
