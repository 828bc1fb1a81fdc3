"""Experts modules that Transformers' `use_experts_implementation` decorated: nearly all.

Transformers calls our registered function in place of the module's own loop.
"""

from torch import nn

from runtime.hf.adapters.base import ExpertsAdapter
from runtime.hf.adapters.placeholders import LazyParameter, connect_placeholders, replace_parameter
from runtime.hf.adapters.served import LayerExperts
from runtime.hf.experts import find_accumulation
from runtime.store.recipe import FusedParameter


class InterfaceAdapter(ExpertsAdapter):
    """Computed by `runtime.hf.experts`, or by the module's own loop where that computes otherwise.

    With another implementation set, the placeholders refuse.
    """

    name = "interface"

    def matches(self, module: nn.Module) -> bool:
        return hasattr(module, "has_gate") and hasattr(module, "_is_expert_parallel")

    def strip(self, bank: str, module: nn.Module) -> list[FusedParameter]:
        taken = []
        for name, value in list(module._parameters.items()):
            if value is None or value.shape[:1] != (self.num_experts(module),):
                continue
            parameter = FusedParameter(bank, name, tuple(value.shape), value.dtype)
            taken.append(replace_parameter(module, name, LazyParameter(parameter)))
        return taken

    def attach(self, module: nn.Module, served: LayerExperts) -> None:
        connect_placeholders(module, served)
        module.moecast_ready = served.in_place
        module.moecast_sum = find_accumulation(module)
