"""What moecast knows about one way of keeping a layer's routed experts."""

from typing import ClassVar

from torch import Tensor, nn

from runtime.hf.adapters.placeholders import MissingParameter
from runtime.hf.adapters.served import LayerExperts
from runtime.hf.routing import RouterOutput, read_routing
from runtime.store.recipe import FusedParameter


class ExpertsAdapter:
    """Recognised by the structure of the module, never by the name of a model."""

    name: ClassVar[str]
    router_inside: ClassVar[bool] = False
    """Whether the router is in the experts module, not beside it."""

    def matches(self, module: nn.Module) -> bool:
        """Whether a module keeps its experts this way, stripped or not."""
        raise NotImplementedError

    def num_experts(self, module: nn.Module) -> int:
        """Experts that have parameters of their own; a router's higher ids mean "skip"."""
        return int(module.num_experts)

    def strip(self, bank: str, module: nn.Module) -> list[FusedParameter]:
        """Takes the experts' parameters out of the module named `bank`, which is on meta."""
        raise NotImplementedError

    def attach(self, module: nn.Module, served: LayerExperts) -> None:
        """Lets the stripped module compute with the experts of `served`."""
        raise NotImplementedError

    def top_k(self, _router: nn.Module) -> int | None:
        """Experts per token, where the router's own make fixes it; None: the configuration says."""
        return None

    def routing(self, output: object, _router: nn.Module, _parent: nn.Module, /) -> RouterOutput:
        """What the router chose, from what it returned. The parent is the module it is in."""
        return read_routing(output)


def has_class_suffix(module: nn.Module, suffix: str) -> bool:
    """Whether the module's class is called so; experts that every token uses are not meant."""
    name = type(module).__name__
    return name.endswith(suffix) and "Shared" not in name


def find_parameters(module: nn.Module, dim: int) -> dict[str, Tensor | MissingParameter]:
    """The module's own parameters of `dim` dimensions, or what stands in their place."""
    found = {**module._parameters, **vars(module)}
    return {
        name: value
        for name, value in found.items()
        if isinstance(value, Tensor | MissingParameter) and len(value.shape) == dim
    }
