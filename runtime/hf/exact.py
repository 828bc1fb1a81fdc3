"""Chooses which implementation of Transformers a model's experts are computed as."""

from collections.abc import Sequence
from contextlib import nullcontext

import torch
from transformers import PreTrainedModel

from runtime.config import Exact
from runtime.errors import CheckpointError
from runtime.hf.adapters.fused import InterfaceAdapter
from runtime.hf.grouped import GROUPED_MM, GroupedExperts, GroupedLaunches, SlotSource
from runtime.hf.layers import MoeLayer, find_adapter, find_expert_banks
from runtime.store.base import name_format
from runtime.store.layout import ExpertLayout
from runtime.transfer.arena import Arena

QUANTISED = "the checkpoint's experts are quantised, and Transformers groups other matrices only"


def choose_exact(wanted: Exact, device: torch.device, obstacle: str | None) -> Exact:
    """Return what `wanted` stands for, never `auto`.

    Args:
        obstacle: the reason why experts cannot be grouped; None: they can.

    Raises:
        CheckpointError: `grouped` in spite of an obstacle.
    """
    if wanted is Exact.GROUPED and obstacle is not None:
        raise CheckpointError(
            f"model.exact=grouped: {obstacle}; use model.exact=eager, or auto, which groups where "
            "that is possible"
        )
    if wanted is Exact.AUTO:
        return Exact.EAGER if device.type == "cpu" or obstacle is not None else Exact.GROUPED
    return wanted


def find_model_obstacle(model: PreTrainedModel) -> str | None:
    """Return why Transformers does not group a model's experts; it may be on the meta device."""
    for name, module in find_expert_banks(model).items():
        if not isinstance(find_adapter(module), InterfaceAdapter):
            return f"{name} ({type(module).__name__}) computes its experts with other code"
    return None


def find_store_obstacle(layouts: Sequence[ExpertLayout]) -> str | None:
    """Return why experts that lie in memory like this are not grouped."""
    for layout in layouts:
        if not layout.is_plain:
            return f"experts are {name_format(layout)} in memory, and such matrices are not grouped"
    return None


def attach_grouped(
    layers: Sequence[MoeLayer], source: SlotSource, arena: Arena
) -> list[GroupedExperts]:
    """Let layers, attached before, compute the experts in an arena together."""
    attached = []
    for layer in layers:
        make = GroupedExperts if arena.device.type == "cpu" else GroupedLaunches
        layer.experts.moecast_grouped = make(layer.experts, source, layer.index, arena)
        attached.append(layer.experts.moecast_grouped)
    return attached


def set_reference(model: PreTrainedModel, wanted: Exact) -> Exact:
    """Let a whole model, as Transformers loads it, compute what a served one is compared with.

    Returns:
        The setting in force, never `auto`; `eager` for `shared`, which is the same for a sequence
        that is not in a block.

    Raises:
        CheckpointError: `grouped`, and Transformers does not group this model's experts.
    """
    obstacle = find_model_obstacle(model)
    if getattr(model.config, "quantization_config", None) is not None:
        obstacle = QUANTISED
    exact = choose_exact(wanted, model.device, obstacle)
    if exact is Exact.GROUPED:
        model.set_experts_implementation(GROUPED_MM)
        # Off the CPU, `generate` would compute single tokens as `batched_mm`, with other last bits.
        model._optimize_model_for_decode = nullcontext
    return Exact.EAGER if exact is Exact.SHARED else exact
