"""One batched product over all experts, every token with every expert (llama4).

The block multiplies each token by each expert's score, exactly 0 where it was not chosen; with an
activation that maps 0 to 0 such a row adds nothing. So only experts with a row other than 0 are
fetched and computed, all rows at once.

Bitwise equal to the product over all experts: the rows of an expert stay together, because a
kernel's choice depends on their number, and the product is done on a batch of two equal experts,
because a batch of one takes another path through the library (measured on the CPU in float32 with
more than one thread: a batch of one differs in the last bits, a batch of two never did).
"""

import functools
import inspect

import torch
from torch import Tensor, nn

from runtime.hf.adapters.base import (
    ExpertsAdapter,
    LayerExperts,
    RouterOutput,
    find_parameters,
    find_tensors,
    has_class_suffix,
    take_parameter,
)
from runtime.store.weight_plan import FusedParameter


def compute_dense_experts(module: nn.Module, served: LayerExperts, hidden: Tensor) -> Tensor:
    """`(E * T, D) -> (E * T, D)`: row `e * T + t` is token t as expert e sees it."""
    num_experts = int(module.num_experts)
    hidden_ETD = hidden.view(num_experts, -1, hidden.shape[-1])
    chosen_E = hidden_ETD.ne(0).flatten(1).any(dim=1)
    output_ETD = torch.zeros_like(hidden_ETD)
    batch, transposed = min(2, num_experts), getattr(module, "is_transposed", True)

    def product(x_TD: Tensor, weight: Tensor) -> Tensor:
        if not transposed:  # rows of a GGUF file
            weight = weight.T
        return torch.bmm(x_TD.expand(batch, -1, -1), weight.expand(batch, -1, -1))[0]

    for expert, weights in served.ready(chosen_E.nonzero().flatten().tolist()):
        gate_up_TF = product(hidden_ETD[expert], weights["gate_up_proj"])
        gate_TF, up_TF = gate_up_TF.chunk(2, dim=-1)
        inner_TF = up_TF * module.act_fn(gate_TF)
        output_ETD[expert] = product(inner_TF, weights["down_proj"])
    return output_ETD.view(hidden.shape)


class DenseAdapter(ExpertsAdapter):
    """Differs from a loop over experts in its call: it gets only the tokens."""

    name = "dense"

    def matches(self, module: nn.Module) -> bool:
        return (
            has_class_suffix(module, "Experts")
            and set(find_parameters(module, 3)) == {"gate_up_proj", "down_proj"}
            and len(inspect.signature(type(module).forward).parameters) == 2
        )

    def strip(self, bank: str, module: nn.Module) -> list[FusedParameter]:
        return [take_parameter(module, name, bank) for name in list(module._parameters)]

    def attach(self, module: nn.Module, served: LayerExperts) -> None:
        module.forward = functools.partial(compute_dense_experts, module, served)

    def routing(self, output: object, router: nn.Module, _parent: nn.Module, /) -> RouterOutput:
        """Reads `(scores_TE, logits_TE)`, with scores of 0 for experts that are not chosen."""
        scores_TE, logits_TE = find_tensors(output)
        indices_TK = logits_TE.topk(int(router.top_k), dim=-1).indices
        return RouterOutput(indices_TK, logits_TE, scores_TE.gather(-1, indices_TK))
