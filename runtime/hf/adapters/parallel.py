"""Modules that multiply all experts' matrices, of which only those with a token are requested.

`DenseAdapter`: one batched product over all experts, every token with every expert (llama4). The
block multiplies each token by each expert's score, exactly 0 where it was not chosen; with an
activation that maps 0 to 0 such a row adds nothing. So only experts with a row other than 0 are
fetched and computed, all rows at once. Bitwise equal to the product over all experts: the rows of
an expert stay together, because a kernel's choice depends on their number, and the product is done
on a batch of two equal experts, because a batch of one takes another path through the library
(measured on the CPU in float32 with more than one thread: a batch of one differs in the last bits,
a batch of two never did).

`ParallelAdapter`: a block with one matrix per expert that runs over sorted tokens (jetmoe). Both
its feed-forward experts and its mixture of attention heads are of this kind. The product of experts
without tokens has no row, so the result is bitwise the same. An expert's input and output matrices
are fetched together; between the two the block computes attention or an activation, so a layer that
uses more experts than the arena holds fetches twice.
"""

import functools
import inspect

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from runtime.errors import CheckpointError
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


def compute_projection(
    name: str, served: LayerExperts, out_features: int, inputs_ND: Tensor, sizes_E: list[int]
) -> Tensor:
    """`(N, in) -> (N, out)`: rows sorted by expert, `sizes_E[e]` of them for expert e."""
    parts = inputs_ND.split(sizes_E)
    wanted = [expert for expert, size in enumerate(sizes_E) if size]
    outputs = {
        expert: F.linear(parts[expert], weights[name]) for expert, weights in served.ready(wanted)
    }
    if not outputs:
        return inputs_ND.new_empty(0, out_features)
    return torch.cat([outputs[expert] for expert in wanted])


class ParallelAdapter(ExpertsAdapter):
    """The experts module is the whole block: its projections route alike and move together."""

    name = "parallel"
    router_inside = True

    def matches(self, module: nn.Module) -> bool:
        return len(self._projections(module)) > 0

    def _projections(self, module: nn.Module) -> dict[str, nn.Module]:
        return {
            name: child
            for name, child in module.named_children()
            if has_class_suffix(child, "ParallelExperts") and find_parameters(child, 3)
        }

    def num_experts(self, module: nn.Module) -> int:
        projections = self._projections(module).values()
        return min(value.shape[0] for p in projections for value in find_parameters(p, 3).values())

    def strip(self, bank: str, module: nn.Module) -> list[FusedParameter]:
        return [
            take_parameter(child, "weight", bank, name=f"{child_name}.weight")
            for child_name, child in self._projections(module).items()
        ]

    def attach(self, module: nn.Module, served: LayerExperts) -> None:
        for child_name, child in self._projections(module).items():
            out_features = child.weight.shape[1]
            child.forward = functools.partial(
                compute_projection, f"{child_name}.weight", served, out_features
            )

    def routing(self, output: object, router: nn.Module, _parent: nn.Module, /) -> RouterOutput:
        """Reads `(rows_N, _, weights_N, sizes_E, logits_TE)`, sorted by expert.

        `rows_N[n]` is the row of T * K that comes n-th; the list `sizes_E` has each expert's rows.
        """
        parts = output if isinstance(output, tuple) else ()
        sizes_E = next((part for part in parts if isinstance(part, list)), None)
        if sizes_E is None:
            raise CheckpointError("this model's router does not return how many rows an expert has")
        rows_N, _, sorted_weights_N, logits_TE = find_tensors(output)
        sorted_experts_N = torch.repeat_interleave(
            torch.arange(len(sizes_E), device=rows_N.device),
            torch.tensor(sizes_E, device=rows_N.device),
        )
        indices_N = torch.empty_like(rows_N).scatter_(0, rows_N, sorted_experts_N)
        weights_N = torch.empty_like(sorted_weights_N).scatter_(0, rows_N, sorted_weights_N)
        return RouterOutput(
            indices_N.view(-1, int(router.top_k)), logits_TE, weights_N.view(-1, int(router.top_k))
        )
