"""Fused parameters `(experts, out, in)`, read expert by expert.

Nearly all models keep their experts this way. In most of them Transformers calls the registered
experts function in place of the module's own loop (`InterfaceAdapter`). The others (longcat_flash,
step3p7) run their own loop in ascending order of experts, and each index fetches (`LoopAdapter`).
The loop of dbrx splits parameters `(experts * rows, columns)` of a part of the module with
`view(-1, rows, columns)` and indexes an expert; the placeholders answer both (`StackedAdapter`).
"""

import inspect

from torch import nn

from runtime.hf.adapters.base import (
    ExpertsAdapter,
    LayerExperts,
    LazyParameter,
    LazyStackedParameter,
    RouterOutput,
    find_parameters,
    find_tensors,
    has_class_suffix,
    take_parameter,
)
from runtime.hf.experts import find_accumulation
from runtime.store.weight_plan import FusedParameter


class InterfaceAdapter(ExpertsAdapter):
    """Computed by `runtime.hf.experts`, or by the module's own loop where that computes otherwise.

    With another implementation set, the placeholders refuse.
    """

    name = "interface"

    def matches(self, module: nn.Module) -> bool:
        return hasattr(module, "has_gate") and hasattr(module, "_is_expert_parallel")

    def strip(self, bank: str, module: nn.Module) -> list[FusedParameter]:
        count = self.num_experts(module)
        return [
            take_parameter(module, name, bank, LazyParameter)
            for name, value in list(module._parameters.items())
            if value is not None and value.shape[:1] == (count,)
        ]

    def attach(self, module: nn.Module, served: LayerExperts) -> None:
        super().attach(module, served)
        module.moecast_ready = served.in_place
        module.moecast_sum = find_accumulation(module)
        module.moecast_grouped = None


class LoopAdapter(ExpertsAdapter):
    """Differs from a product over all experts in its call: it gets tokens, choices and weights."""

    name = "loop"

    def matches(self, module: nn.Module) -> bool:
        return (
            has_class_suffix(module, "Experts")
            and len(find_parameters(module, 3)) > 0
            and len(inspect.signature(type(module).forward).parameters) >= 4
        )

    def num_experts(self, module: nn.Module) -> int:
        # A parameter may have rows for experts that compute nothing (longcat_flash's zero experts).
        return min(value.shape[0] for value in find_parameters(module, 3).values())

    def strip(self, bank: str, module: nn.Module) -> list[FusedParameter]:
        count = self.num_experts(module)
        taken = []
        for name, value in list(module._parameters.items()):
            if value is not None and value.ndim >= 2 and value.shape[0] >= count:
                sizes = {"shape": (count, *value.shape[1:]), "stored_experts": value.shape[0]}
                taken.append(take_parameter(module, name, bank, LazyParameter, **sizes))
        return taken


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
