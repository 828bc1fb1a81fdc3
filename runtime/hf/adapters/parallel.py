"""A block with one matrix per expert that runs over sorted tokens (jetmoe).

Both its feed-forward experts and its mixture of attention heads are of this kind. A projection's
own loop multiplies every expert's matrix. This one requests only experts that have tokens: the
product of the others has no row, so the result is bitwise the same. An expert's input and output
matrices are fetched together; between the two the block computes attention or an activation, so a
layer that uses more experts than the arena holds fetches twice.
"""

import functools

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
