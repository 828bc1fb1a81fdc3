"""The experts function that Transformers calls in place of its own.

Shape suffixes: T tokens, D hidden size, K top_k, E experts, N tokens of one expert.
"""

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.integrations.moe import ExpertsInterface

IMPLEMENTATION = "moecast"

Ready = Callable[[list[int]], Iterator[tuple[int, dict[str, Tensor]]]]
"""`(experts of the step) -> (expert, its parameters)`, in order of readiness."""


def expert_output(module: nn.Module, weights: dict[str, Tensor], hidden_ND: Tensor) -> Tensor:
    """One expert on its tokens, `(N, D)`: the same operations in the same order as the eager loop
    of the module's own class."""

    def linear(x: Tensor, name: str) -> Tensor:
        x = x @ weights[name] if module.is_transposed else F.linear(x, weights[name])
        return x + weights[f"{name}_bias"] if module.has_bias else x

    if module.has_gate:
        hidden = module._apply_gate(linear(hidden_ND, "gate_up_proj"))
    else:
        hidden = module.act_fn(linear(hidden_ND, "up_proj"))
    output = linear(hidden, "down_proj")
    return module.post_expert_norm(output) if module.has_post_expert_norm else output


def moecast_experts(
    module: nn.Module, hidden_TD: Tensor, experts_TK: Tensor, weights_TK: Tensor
) -> Tensor:
    """Experts are computed as they become ready and added up in ascending order.

    The sum in bf16 depends on the order of its terms; with the eager loop's order and the eager
    loop's terms, the bits are the eager loop's, whatever was cached or late. Ids beyond the last
    expert mean "skip" (expert parallelism, zero experts) and are skipped, as eager does.
    """
    ready: Ready = module.moecast_ready
    # (K, T): `where` then lists an expert's tokens in the order in which eager lists them.
    experts_KT = experts_TK.t()
    wanted = [e for e in torch.unique(experts_TK).tolist() if e < module.num_experts]
    parts: dict[int, tuple[Tensor, Tensor]] = {}
    for expert, weights in ready(wanted):
        slot_N, token_N = torch.where(experts_KT == expert)
        output_ND = expert_output(module, weights, hidden_TD[token_N])
        parts[expert] = token_N, output_ND * weights_TK[token_N, slot_N, None]
    final_TD = torch.zeros_like(hidden_TD)
    for expert in wanted:
        token_N, output_ND = parts[expert]
        final_TD.index_add_(0, token_N, output_ND.to(final_TD.dtype))
    return final_TD


def register() -> None:
    """Makes the function known to Transformers; registering again changes nothing."""
    ExpertsInterface.register(IMPLEMENTATION, moecast_experts)
