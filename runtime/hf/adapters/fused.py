"""Fused parameters `(experts, out, in)`, read expert by expert.

Nearly all models keep their experts this way. In most of them Transformers calls the registered
experts function in place of the module's own loop (`InterfaceAdapter`). The others (longcat_flash,
step3p7) run their own loop in ascending order of experts, and each index fetches (`LoopAdapter`).
"""

import inspect

from torch import nn

from runtime.hf.adapters.base import (
    ExpertsAdapter,
    LayerExperts,
    LazyParameter,
    find_parameters,
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
