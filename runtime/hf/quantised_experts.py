"""Computes experts that lie in their slots as they are stored, all that are ready in one call.

Everything between the router and the sum over a token's experts is float32; the sum is rounded once
to the dtype of the hidden states. Each token's bits depend on its own row alone, so that they are
the same in every batch, whatever was cached or late.

Shape suffixes: T tokens, D hidden size, K top_k, P pairs of a token and an expert (T times K), F
width of a projection's output.
"""

from collections.abc import Iterable, Mapping
from itertools import chain
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from runtime.store.ggml.library import find_products
from runtime.store.ggml.matrix import ExpertWeights, QuantisedExpert, count_threads

TOKENS_AT_ONCE = 512
"""Tokens of a prompt that are computed together where no expert is waited for.

A pair's result takes 4 D bytes until its token's sum: 64 KiB a token for K = 8 and D = 2,048.
"""
TOLERANCE = 1e-5
"""The tolerance of the comparison of a module's gate with SiLU, in float32."""
_IS_SILU: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()


def compute_quantised(
    module: nn.Module,
    ready: Iterable[Mapping[int, ExpertWeights]],
    hidden_TD: Tensor,
    experts_TK: Tensor,
    weights_TK: Tensor,
) -> Tensor:
    """Compute experts as they become ready, and add up each token's in ascending order.

    Ids beyond the last expert mean "skip". Long prompts are computed in parts, if all experts are
    ready at once.
    """
    if len(hidden_TD) > TOKENS_AT_ONCE:
        batches = iter(ready)
        first = next(batches, {})
        wanted = experts_TK.unique()
        if len(first) == int((wanted < module.num_experts).sum()):
            inputs = (hidden_TD, experts_TK, weights_TK)
            parts = zip(*(x.split(TOKENS_AT_ONCE) for x in inputs), strict=True)
            sums_TD = torch.cat([_compute_together(module, [first], *part) for part in parts])
            rest = next(batches, None)  # what comes after the last batch has to run
            assert rest is None, "all experts were ready"
            return sums_TD
        ready = chain([first], batches)
    return _compute_together(module, ready, hidden_TD, experts_TK, weights_TK)


def _compute_together(
    module: nn.Module,
    ready: Iterable[Mapping[int, ExpertWeights]],
    hidden_TD: Tensor,
    experts_TK: Tensor,
    weights_TK: Tensor,
) -> Tensor:
    """Compute all tokens; batches may have experts that none of them chose."""
    products, num_experts = find_products(), int(module.num_experts)
    assert products is not None
    (num_tokens, top_k), hidden_size = experts_TK.shape, hidden_TD.shape[1]
    ids_TK, weights_TK = experts_TK.long().contiguous(), weights_TK.float().contiguous()
    pairs: dict[int, list[int]] = {}
    for pair, expert in enumerate(ids_TK.flatten().tolist()):
        if expert < num_experts:
            pairs.setdefault(expert, []).append(pair)
    x_TD = hidden_TD.float().contiguous()
    results_PD = torch.empty(num_tokens * top_k, hidden_size)
    for batch in ready:
        chosen = [expert for expert in batch if expert in pairs]
        experts = [one for e in chosen if isinstance(one := batch[e], QuantisedExpert)]
        assert len(experts) == len(chosen), "experts of one layer lie alike"
        if not experts:
            continue
        own = [pairs[expert] for expert in chosen]
        if _is_fused(module, experts[0]):
            up, down = (experts[0].matrices[name] for name in ("gate_up_proj", "down_proj"))
            products.compute(
                up.parts,
                hidden_size,
                down.parts,
                [expert.address for expert in experts],
                own,
                top_k,
                num_tokens,
                x_TD.data_ptr(),
                results_PD.data_ptr(),
                count_threads(),
            )
        else:
            _compute_in_steps(module, experts, own, top_k, x_TD, results_PD)
    sums_TD = torch.empty(num_tokens, hidden_size)
    products.add_up(
        results_PD.data_ptr(),
        weights_TK.data_ptr(),
        ids_TK.data_ptr(),
        num_experts,
        num_tokens,
        top_k,
        hidden_size,
        sums_TD.data_ptr(),
    )
    return sums_TD.to(hidden_TD.dtype)


def _is_fused(module: nn.Module, expert: QuantisedExpert) -> bool:
    """Return whether `products.c` computes the whole expert: a gate by SiLU and no bias."""
    if module not in _IS_SILU:
        _IS_SILU[module] = module.has_gate and _has_silu(module)
    return _IS_SILU[module] and not (expert.tensors or module.has_post_expert_norm)


@torch.no_grad()
def _has_silu(module: nn.Module) -> bool:
    generator = torch.Generator().manual_seed(0)
    gate_up = torch.randn(4, 16, generator=generator) * 4
    gate, up = gate_up.chunk(2, dim=-1)
    expected = F.silu(gate) * up
    return torch.allclose(module._apply_gate(gate_up), expected, rtol=TOLERANCE, atol=TOLERANCE)


def _compute_in_steps(
    module: nn.Module,
    experts: list[QuantisedExpert],
    pairs: list[list[int]],
    top_k: int,
    x_TD: Tensor,
    results_PD: Tensor,
) -> None:
    """Compute with the module's own activation, row by row: a row's place may change its bits."""
    up_name = "gate_up_proj" if module.has_gate else "up_proj"
    activate = module._apply_gate if module.has_gate else module.act_fn
    up_PF = _multiply(up_name, experts, pairs, top_k, x_TD)
    width = experts[0].matrices["down_proj"].num_columns
    inner_PF = torch.zeros(len(up_PF), width)
    for pair in (pair for own in pairs for pair in own):
        inner_PF[pair] = activate(up_PF[pair].clone()[None])[0]
    output_PD = _multiply("down_proj", experts, pairs, 1, inner_PF)
    for pair in (pair for own in pairs for pair in own):
        row_D = output_PD[pair]
        if module.has_post_expert_norm:
            row_D = module.post_expert_norm(row_D.clone()[None])[0]
        results_PD[pair] = row_D


def _multiply(
    name: str, experts: list[QuantisedExpert], pairs: list[list[int]], top_k: int, x: Tensor
) -> Tensor:
    """Return products of the pairs' rows with one matrix of each expert, plus its bias."""
    addresses = [expert.address for expert in experts]
    results_PF = experts[0].matrices[name].multiply(addresses, pairs, top_k, x)
    for expert, own in zip(experts, pairs, strict=True):
        if (bias := expert.tensors.get(f"{name}_bias")) is not None:
            results_PF[own] += bias.float()
    return results_PF
