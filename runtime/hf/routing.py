"""Reads a router's choice from its output.

Shape suffixes: T tokens, E experts, K top_k, N = T * K rows sorted by expert.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from runtime.errors import CheckpointError


class RouterOutput(NamedTuple):
    """Ids at or above the number of experts mean that a token skips this choice."""

    indices: Tensor
    """`(..., K)`, integers."""
    logits: Tensor | None
    """`(..., E)`, before any activation or bias."""
    weights: Tensor | None
    """`(..., K)`, what each chosen expert's output is multiplied by."""


def _tensors(output: object) -> list[Tensor]:
    parts = output if isinstance(output, tuple) else (output,)
    return [part for part in parts if isinstance(part, Tensor)]


def read_routing(output: object) -> RouterOutput:
    """Read `(logits_TE, weights_TK, indices_TK)`, the output of nearly all routers.

    Indices are recognised by their dtype, because some models add a bias to the logits.

    Raises:
        CheckpointError: the output has no indices.
    """
    parts = _tensors(output)
    indices = next((part for part in parts if not part.is_floating_point()), None)
    if indices is None:
        raise CheckpointError("this model's router does not return the chosen experts")
    floats = [part for part in parts if part.is_floating_point()]
    top_k = indices.shape[-1]
    weights = next((part for part in floats if part.shape == indices.shape), None)
    logits = next((part for part in floats if part.shape[-1] != top_k), None)
    return RouterOutput(indices, logits, weights)


def read_block_routing(block: nn.Module, output: object) -> RouterOutput:
    """Read logits whose choice is made by a method of the block."""
    (logits_TE,) = _tensors(output)
    weights_TK, indices_TK = block.route_tokens_to_experts(logits_TE)
    return RouterOutput(indices_TK, logits_TE, weights_TK)


def read_scores(output: object, *, top_k: int) -> RouterOutput:
    """Read `(scores_TE, logits_TE)`, with scores of 0 for experts that are not chosen."""
    scores_TE, logits_TE = _tensors(output)
    indices_TK = logits_TE.topk(top_k, dim=-1).indices
    return RouterOutput(indices_TK, logits_TE, scores_TE.gather(-1, indices_TK))


def read_group_sizes(output: object, *, top_k: int) -> RouterOutput:
    """Read `(rows_N, _, weights_N, sizes_E, logits_TE)`, sorted by expert.

    `rows_N[n]` is the row of T * K that comes n-th; the list `sizes_E` has each expert's rows.
    """
    parts = output if isinstance(output, tuple) else ()
    sizes_E = next((part for part in parts if isinstance(part, list)), None)
    if sizes_E is None:
        raise CheckpointError("this model's router does not return how many rows an expert has")
    rows_N, _, sorted_weights_N, logits_TE = _tensors(output)
    sorted_experts_N = torch.repeat_interleave(
        torch.arange(len(sizes_E), device=rows_N.device),
        torch.tensor(sizes_E, device=rows_N.device),
    )
    indices_N = torch.empty_like(rows_N).scatter_(0, rows_N, sorted_experts_N)
    weights_N = torch.empty_like(sorted_weights_N).scatter_(0, rows_N, sorted_weights_N)
    return RouterOutput(indices_N.view(-1, top_k), logits_TE, weights_N.view(-1, top_k))


def read_mask(output: object, *, top_k: int) -> RouterOutput:
    """Read `(choice, weights, logits_TE)` of routers with a capacity, as the experts read it.

    A choice `(batch, sequence, E)` is a mask, 1 at the chosen expert and all 0 for a token beyond
    the capacity. A choice `(T, columns)` holds expert ids, which the experts one-hot themselves;
    the weights have its shape. (NLLB-MoE hands a mask over this way in Transformers 5.23, so that
    every token goes to the experts 0 and 1; what is computed is what is reported.)
    """
    choice, weights, logits = _tensors(output)
    num_experts = logits.shape[-1]
    if choice.ndim == 3:
        chosen, indices = choice.max(dim=-1, keepdim=True)
        return RouterOutput(indices.masked_fill(chosen == 0, num_experts), logits, weights)
    used_TE = torch.nn.functional.one_hot(choice, num_classes=num_experts)
    weights_TE = (used_TE * weights.unsqueeze(-1)).sum(dim=1)
    found_TK, indices_TK = used_TE.any(dim=1).long().topk(top_k, dim=-1)
    weights_TK = weights_TE.gather(-1, indices_TK)
    return RouterOutput(indices_TK.masked_fill(found_TK == 0, num_experts), logits, weights_TK)
