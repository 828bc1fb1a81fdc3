"""Parameters `(experts * rows, columns)` of a part of the experts module: dbrx.

The module's own loop splits them with `view(-1, rows, columns)` and indexes an expert; the
placeholders answer both.
"""

from torch import nn

from runtime.hf.adapters.base import (
    ExpertsAdapter,
    LazyStackedParameter,
    RouterOutput,
    find_parameters,
    find_tensors,
    has_class_suffix,
    take_parameter,
)
from runtime.store.weight_plan import FusedParameter


class StackedAdapter(ExpertsAdapter):
    """Adapts experts modules whose single part stacks the experts' matrices along the rows."""

    name = "stacked"

    def matches(self, module: nn.Module) -> bool:
        return (
            has_class_suffix(module, "Experts")
            and isinstance(getattr(module, "num_experts", None), int)
            and not isinstance(module, nn.ModuleDict | nn.ModuleList)
            and not find_parameters(module, 3)
            and len(self._parts(module)) == 1
        )

    def _parts(self, module: nn.Module) -> dict[str, nn.Module]:
        num_experts = self.num_experts(module)

        def has_stacks(part: nn.Module) -> bool:
            stacks = find_parameters(part, 2).values()
            return len(stacks) > 1 and all(value.shape[0] % num_experts == 0 for value in stacks)

        return {
            name: part
            for name, part in module.named_children()
            if has_stacks(part)
            or any(isinstance(v, LazyStackedParameter) for v in vars(part).values())
        }

    def strip(self, bank: str, module: nn.Module) -> list[FusedParameter]:
        num_experts = self.num_experts(module)
        taken = []
        for part_name, part in self._parts(module).items():
            for name, value in list(part._parameters.items()):
                shape = num_experts, value.shape[0] // num_experts, value.shape[1]
                fields = {"name": f"{part_name}.{name}", "shape": shape}
                taken.append(take_parameter(part, name, bank, LazyStackedParameter, **fields))
        return taken

    def routing(self, output: object, _router: nn.Module, parent: nn.Module, /) -> RouterOutput:
        """Reads logits whose choice is made by a method of the parent."""
        (logits_TE,) = find_tensors(output)
        weights_TK, indices_TK = parent.route_tokens_to_experts(logits_TE)
        return RouterOutput(indices_TK, logits_TE, weights_TK)
