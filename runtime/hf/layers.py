"""Finds a model's layers with routed experts through Transformers' own records, not by names."""

from dataclasses import dataclass

from torch import nn
from transformers import PreTrainedModel

from runtime.errors import CheckpointError

ROUTER_NAMES = ("gate", "router")
"""Only asked where a model keeps no record of its router logits."""


@dataclass(frozen=True)
class MoeLayer:
    """One layer with routed experts."""

    index: int
    """Position among the layers with routed experts: the number that predictors use."""
    name: str
    """Dotted name of the experts module."""
    experts: nn.Module
    router: nn.Module
    block: nn.Module
    """The decoder layer around them, whose input is the layer's input."""


def is_expert_bank(module: nn.Module) -> bool:
    """True for modules that Transformers' `use_experts_implementation` decorated."""
    return hasattr(module, "has_gate") and hasattr(module, "_is_expert_parallel")


def expert_banks(model: nn.Module) -> dict[str, nn.Module]:
    """Experts modules by dotted name, in the order in which the model runs them."""
    return {name: module for name, module in model.named_modules() if is_expert_bank(module)}


def _router_classes(model: PreTrainedModel) -> tuple[type[nn.Module], ...]:
    classes = []
    for module in model.modules():
        recorded = (getattr(module, "_can_record_outputs", None) or {}).get("router_logits")
        for recorder in recorded if isinstance(recorded, (list, tuple)) else [recorded]:
            target = getattr(recorder, "target_class", recorder)
            if isinstance(target, type):
                classes.append(target)
    return tuple(classes)


def _router_of(parent: nn.Module, classes: tuple[type[nn.Module], ...]) -> nn.Module | None:
    for child in parent.modules():
        if child is not parent and classes and isinstance(child, classes):
            return child
    for name in ROUTER_NAMES:
        if isinstance(getattr(parent, name, None), nn.Module):
            return getattr(parent, name)
    return None


def moe_layers(model: PreTrainedModel) -> list[MoeLayer]:
    """The model's layers with routed experts, bottom first.

    Raises:
        CheckpointError: no experts, or an experts module without a router beside it.
    """
    classes = _router_classes(model)
    layers: list[MoeLayer] = []
    for name, experts in expert_banks(model).items():
        parent_name = name.rpartition(".")[0]
        router = _router_of(model.get_submodule(parent_name), classes)
        if router is None:
            raise CheckpointError(
                f"{name}: no router found beside the experts of {type(model).__name__}"
            )
        layers.append(
            MoeLayer(
                index=len(layers),
                name=name,
                experts=experts,
                router=router,
                block=model.get_submodule(_block_name(name)),
            )
        )
    if not layers:
        raise CheckpointError(
            f"{type(model).__name__} has no routed experts that Transformers' experts interface "
            "reaches; moecast serves Mixture-of-Experts models only"
        )
    return layers


def _block_name(experts_name: str) -> str:
    """`model.layers.3.mlp.experts` -> `model.layers.3`: up to the last numbered module."""
    parts = experts_name.split(".")
    last = max(i for i, part in enumerate(parts) if part.isdigit())
    return ".".join(parts[: last + 1])
