"""Finds a model's layers with routed experts through Transformers' own records, not by names."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from predictors.baselines import SkipPredictor
from predictors.spec import RouterSamples, encode_samples, sample_positions
from runtime.errors import CheckpointError
from runtime.hf.adapters.base import ExpertsAdapter, ExpertSource, LayerExperts
from runtime.hf.adapters.fused import InterfaceAdapter, LoopAdapter, StackedAdapter
from runtime.hf.adapters.members import MembersAdapter
from runtime.hf.adapters.parallel import DenseAdapter, ParallelAdapter
from runtime.store.model_check import CONFIG

ROUTER_NAMES = ("gate", "router")
"""Names of routers, for models that do not record router logits."""

Classes = tuple[type[nn.Module], ...]

ADAPTERS: tuple[ExpertsAdapter, ...] = (
    InterfaceAdapter(),
    MembersAdapter(),
    ParallelAdapter(),
    DenseAdapter(),
    LoopAdapter(),
    StackedAdapter(),
)
"""In the order in which they are tried; the first match is used."""


def find_adapter(module: nn.Module) -> ExpertsAdapter | None:
    return next((adapter for adapter in ADAPTERS if adapter.matches(module)), None)


@dataclass(frozen=True)
class MoeLayer:
    """A layer with routed experts."""

    index: int
    """Position among the layers with routed experts: the number that predictors use."""
    name: str
    """Dotted name of the experts module."""
    experts: nn.Module
    router: nn.Module
    """The router, or the module that would contain it: that one never reports a choice."""
    parent: nn.Module
    """The module that contains the router."""
    block: nn.Module
    """The decoder or encoder layer around them, whose input is the layer's input."""
    adapter: ExpertsAdapter
    """The way in which the experts are stored."""

    @property
    def num_experts(self) -> int:
        return self.adapter.num_experts(self.experts)

    @property
    def top_k(self) -> int | None:
        """Experts per token, where the router's own make fixes it."""
        return self.adapter.top_k(self.router)


def find_expert_banks(model: nn.Module) -> dict[str, nn.Module]:
    """Experts modules by dotted name, in the order in which the model defines them."""
    banks: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        within = any(name.startswith(f"{bank}.") for bank in list(banks)[-1:])
        if not within and find_adapter(module) is not None:
            banks[name] = module
    return banks


def _find_recorded_classes(model: nn.Module, what: str) -> Classes:
    """Classes whose outputs Transformers records under a name, anywhere in the model."""
    classes = []
    for module in model.modules():
        recorded = (getattr(module, "_can_record_outputs", None) or {}).get(what)
        for recorder in recorded if isinstance(recorded, (list, tuple)) else [recorded]:
            target = getattr(recorder, "target_class", recorder)
            if isinstance(target, type):
                classes.append(target)
    return tuple(classes)


def _find_router(parent: nn.Module, classes: Classes) -> nn.Module | None:
    for child in parent.modules():
        if child is not parent and classes and isinstance(child, classes):
            return child
    for name in ROUTER_NAMES:
        if isinstance(getattr(parent, name, None), nn.Module):
            return getattr(parent, name)
    return None


def find_moe_layers(model: PreTrainedModel) -> list[MoeLayer]:
    """The model's layers with routed experts, in the order in which it runs them.

    Raises:
        CheckpointError: no experts.
    """
    routers = _find_recorded_classes(model, "router_logits")
    blocks = _find_recorded_classes(model, "hidden_states")
    candidates: list[tuple[str, MoeLayer]] = []
    for name, experts in find_expert_banks(model).items():
        adapter = find_adapter(experts)
        assert adapter is not None
        parent = experts if adapter.router_inside else model.get_submodule(name.rpartition(".")[0])
        # What has no router to listen to is served all the same, when its experts are called.
        router = _find_router(parent, routers) or parent
        block_name = _find_block_name(model, name, blocks)
        block = model.get_submodule(block_name)
        candidates.append((block_name, MoeLayer(0, name, experts, router, parent, block, adapter)))
    if not candidates:
        raise CheckpointError(
            f"{type(model).__name__} has no routed experts that moecast can serve; "
            "it serves Mixture-of-Experts models only"
        )
    # Blocks run as the model defines them; in a block, experts of the attention (jetmoe) come
    # before those of its MLP.
    order = list(dict.fromkeys(block for block, _ in candidates))

    def position(candidate: tuple[str, MoeLayer]) -> tuple[int, bool]:
        block, layer = candidate
        return order.index(block), "attention" not in layer.name.removeprefix(block)

    candidates.sort(key=position)
    return [replace(layer, index=index) for index, (_, layer) in enumerate(candidates)]


def _find_block_name(model: nn.Module, experts_name: str, classes: Classes) -> str:
    """The innermost module around the experts whose hidden states Transformers records.

    Without a record up to the last numbered one, `model.layers.3.mlp.experts` -> `model.layers.3`.
    """
    parts = experts_name.split(".")
    for end in range(len(parts) - 1, 0, -1):
        if classes and isinstance(model.get_submodule(".".join(parts[:end])), classes):
            return ".".join(parts[:end])
    last = max(i for i, part in enumerate(parts) if part.isdigit())
    return ".".join(parts[: last + 1])


CONFIG_NAMES = ("num_experts_per_tok", "moe_top_k", "top_k_experts")
"""Names in configurations, for routers that do not state it; Transformers maps most to the
first."""


def find_top_k(model: PreTrainedModel, layers: Iterable[MoeLayer]) -> int:
    """The most that any layer's router chooses for one token.

    Raises:
        CheckpointError: neither the routers nor the configuration say, or there are not so many.
    """
    config = model.config.get_text_config()
    parts = (config, getattr(config, "ffn_config", None))
    layers = list(layers)
    values = [layer.top_k for layer in layers]
    values += [getattr(layer.router, "top_k", None) for layer in layers]
    values += [getattr(part, name, None) for part in parts for name in CONFIG_NAMES]
    known = [value for value in values if isinstance(value, int)]
    if not known:
        raise CheckpointError(f"{type(config).__name__} does not say how many experts a token uses")
    top_k, num_experts = max(known), max(layer.num_experts for layer in layers)
    groups, chosen = (count_groups(config, name) for name in ("n_group", "topk_group"))
    size, rest = divmod(num_experts, groups) if groups else (0, 0)
    if rest or not 1 <= chosen <= groups or not 1 <= top_k <= chosen * size:
        within = f", in {chosen} (topk_group) of {groups} (n_group) groups" if groups != 1 else ""
        raise CheckpointError(
            f"{model.config.name_or_path or CONFIG}: a token cannot use {top_k} "
            f"(num_experts_per_tok) of {num_experts} experts{within}; fetch the file again"
        )
    return top_k


def count_groups(config: PreTrainedConfig, name: str) -> int:
    """Return an option of routers that choose groups of experts first; 0 for null where they do."""
    value: int | None = getattr(config, name, 1)
    if value is None:
        return 1 if getattr(type(config), name, None) is None else 0
    return value


def attach_experts(
    layers: Iterable[MoeLayer], source: ExpertSource, *, home: torch.device | None = None
) -> list[LayerExperts]:
    """Let the layers compute with experts of the source; see `LayerExperts` for `home`."""
    attached = []
    for layer in layers:
        experts = LayerExperts(source, layer.index, home=home)
        layer.adapter.attach(layer.experts, experts)
        attached.append(experts)
    return attached


def build_skip_predictor(
    layers: Sequence[MoeLayer], given: Mapping[str, Any]
) -> SkipPredictor | None:
    """Return a predictor made of the routers' own weights; None where a router is not one matrix.

    `given` are the `spec` of the model and the predictor's options. A router's bias is left out.
    """
    spec = given["spec"]
    matrices = find_router_matrices(layers, hidden_size=spec.hidden_size)
    if spec.num_layers < 2 or matrices is None:
        return None
    routers_LED = np.stack([weight.detach().float().cpu().numpy() for weight in matrices])
    return SkipPredictor(routers_LED=routers_LED, **given)


def find_router_matrices(layers: Sequence[MoeLayer], *, hidden_size: int) -> list[Tensor] | None:
    """Return the routers' weights, all of one shape; None where a router is not one matrix."""
    weights = [getattr(layer.router, "weight", None) for layer in layers]
    shape = (max(layer.num_experts for layer in layers), hidden_size)
    matrices = [w for w in weights if isinstance(w, Tensor) and tuple(w.shape) == shape]
    return matrices if len(matrices) == len(layers) else None


def sample_routers(layers: Sequence[MoeLayer], *, hidden_size: int) -> RouterSamples | None:
    """Return samples of the routers' weights; None where a router is not one matrix."""
    matrices = find_router_matrices(layers, hidden_size=hidden_size)
    if matrices is None or any(matrix.is_meta for matrix in matrices):
        return None
    positions = torch.tensor(sample_positions(matrices[0].numel()))
    return encode_samples([w.detach().flatten()[positions.to(w.device)].tolist() for w in matrices])
