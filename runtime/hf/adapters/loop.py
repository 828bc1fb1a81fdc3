"""Fused parameters `(experts, out, in)` that the module's own loop indexes expert by expert:
longcat_flash, step3p7.

The loop runs as it is, in ascending order of experts; each index fetches. Bitwise eager, because it
is the eager loop.
"""

import inspect

from torch import nn

from runtime.hf.adapters.base import ExpertsAdapter, find_parameters, has_class_suffix
from runtime.hf.adapters.placeholders import LazyParameter, connect_placeholders, replace_parameter
from runtime.hf.adapters.served import LayerExperts
from runtime.store.recipe import FusedParameter


class LoopAdapter(ExpertsAdapter):
    """Told from a product over all experts by what it is called with: tokens, choices, weights."""

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
        num_experts = self.num_experts(module)
        taken = []
        for name, value in list(module._parameters.items()):
            if value is None or value.ndim < 2 or value.shape[0] < num_experts:
                continue
            parameter = FusedParameter(
                bank,
                name,
                (num_experts, *value.shape[1:]),
                value.dtype,
                stored_experts=value.shape[0],
            )
            taken.append(replace_parameter(module, name, LazyParameter(parameter)))
        return taken

    def attach(self, module: nn.Module, served: LayerExperts) -> None:
        connect_placeholders(module, served)
