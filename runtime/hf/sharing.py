"""Chooses whether a model's sequences are computed in blocks of rows (`runtime.hf.row_block`).

The reference of such a block is Transformers that computes a batch of copies of one sequence.
"""

import copy
import functools
import inspect
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache, PreTrainedConfig, PreTrainedModel
from transformers.integrations.moe import ExpertsInterface

from predictors.errors import MoecastError
from runtime.config import Exact
from runtime.hf.decode_step import ATTENTION, register_attention
from runtime.hf.experts import find_accumulation, run_own_loop, separate_rows
from runtime.hf.forward_pass import find_generating_parts
from runtime.hf.grouped import find_model_obstacle
from runtime.hf.layers import find_expert_banks
from runtime.hf.row_block import NUM_ROWS, SMALL_BLOCK_ROWS, compute_block, read_decode_step
from runtime.hf.tokens import rope_parameters

log = logging.getLogger(__name__)

LENGTHS = (5, 3)
"""Tokens of the prompts of a check."""
STEPS = 2
TOLERANCE = {torch.float32: 1e-3}
COARSE_TOLERANCE = 0.1
"""Largest difference of logits from those of a sequence that is computed alone, as a share of the
largest logit: a mask or a state that blocks do not know makes a larger one."""
ROPE_BY_LENGTH = ("dynamic", "longrope")
"""Rotary embeddings that depend on the longest sequence of a batch."""


def choose_heights(model: PreTrainedModel, obstacle: str | None) -> tuple[int, ...]:
    """Return the numbers of rows that blocks of the model's sequences may have, ascending.

    There are none if its sequences cannot share products; the log has the reason.

    Args:
        obstacle: a known reason why they cannot.

    Raises:
        TransferError: experts of a served model cannot be read.
    """
    obstacle = obstacle or find_sharing_obstacle(model)
    if obstacle is None:
        register_attention()
        obstacle = find_row_dependence(model)
    if obstacle is None:
        return (SMALL_BLOCK_ROWS, NUM_ROWS) if has_small_blocks(model) else (NUM_ROWS,)
    log.warning("model.exact=shared: %s; sequences are computed one by one (eager)", obstacle)
    return ()


def find_sharing_obstacle(model: PreTrainedModel) -> str | None:
    """Return a reason in the model's architecture why its sequences cannot share products."""
    if (obstacle := find_model_obstacle(model)) is not None:
        return obstacle
    config, text = model.config, model.config.get_text_config()
    if not all(find_accumulation(module) for module in find_expert_banks(model).values()):
        return "its experts run their own loop"
    if find_generating_parts(model) != [model]:
        return "it generates with several parts"
    if {config._attn_implementation, text._attn_implementation} != {ATTENTION}:
        return f"its attention is {text._attn_implementation}, not {ATTENTION}"
    if "position_ids" not in inspect.signature(model.forward).parameters:
        return "it takes no position_ids"
    if _attends_in_chunks(text):
        return "it attends within chunks of tokens"
    kinds = [rope["rope_type"] for rope in rope_parameters(text)]
    if rope := next((kind for kind in kinds if kind in ROPE_BY_LENGTH), None):
        return f"its rotary embeddings ({rope}) depend on the longest sequence of a batch"
    return None


def _attends_in_chunks(config: PreTrainedConfig) -> bool:
    return "chunked_attention" in (getattr(config, "layer_types", None) or ())


@torch.no_grad()
def find_row_dependence(model: PreTrainedModel) -> str | None:
    """Decode two short sequences apart and together; return what differs, None if no bit does.

    Raises:
        TransferError: experts of a served model cannot be read.
    """
    try:
        states = [_read_prompt(model, length) for length in LENGTHS]
        first = states[0]
        one_by_one = _decode(model, [first])[0]
        together = _decode(model, states[::-1])[1]
        alone = _decode_alone(model, first)
    except MoecastError:
        raise
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as e:
        # Its code does not know the block's KV cache, or returns no logits.
        return f"its forward pass takes no block of sequences ({type(e).__name__}: {e})"
    if not torch.equal(one_by_one, together):
        return "a kernel of this machine computes a row with other bits next to other rows"
    difference = float((one_by_one - alone).abs().max() / alone.abs().max())
    # Not a number is no small number either.
    if not difference <= TOLERANCE.get(model.dtype, COARSE_TOLERANCE):
        return f"logits of a block differ from those of one sequence by {difference:.1%}"
    return None


@torch.no_grad()
def has_small_blocks(model: PreTrainedModel) -> bool:
    """Returns whether a small block's rows have the bits of the largest one's.

    In bfloat16 a few do not, and rounding hides that from most logits of a check.

    Raises:
        TransferError: experts of a served model cannot be read.
    """
    if model.dtype != torch.float32:
        return False
    state = _read_prompt(model, LENGTHS[0])
    small, large = (_decode(model, [state], rows)[0] for rows in (SMALL_BLOCK_ROWS, NUM_ROWS))
    return torch.equal(small, large)


State = tuple[Tensor, Cache]
"""A sequence's next token and its KV cache."""


def _read_prompt(model: PreTrainedModel, num_tokens: int) -> State:
    vocab_size = model.config.get_text_config().vocab_size
    tokens_1T = torch.arange(1, num_tokens + 1, device=model.device)[None] % vocab_size
    output: Any = model(input_ids=tokens_1T, use_cache=True)
    return tokens_1T[:, -1:], output.past_key_values


def _decode(model: PreTrainedModel, states: list[State], num_rows: int = NUM_ROWS) -> list[Tensor]:
    """Return each sequence's logits of some steps, computed as one block of `num_rows`."""
    steps = []
    for token_11, cache in states:
        given = {"input_ids": token_11, "past_key_values": copy.deepcopy(cache), "use_cache": True}
        if (step := read_decode_step((), given)) is None:
            raise ValueError(f"its {type(cache).__name__} has layers of another kind")
        steps.append(step)
    outputs = []
    for _ in range(STEPS):
        outputs.append(
            [output.logits for output in compute_block(model.forward, steps, [num_rows])]
        )
        steps = [step.advance() for step in steps]
    return [torch.cat(logits).float() for logits in zip(*outputs, strict=True)]


def _decode_alone(model: PreTrainedModel, state: State) -> Tensor:
    token_11, cache = state
    outputs: list[Any] = [
        model(input_ids=token_11, past_key_values=cache, use_cache=True) for _ in range(STEPS)
    ]
    return torch.cat([output.logits for output in outputs]).float()


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
