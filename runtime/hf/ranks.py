"""Expert parallelism: Transformers' own exchange between processes, with offloading.

Transformers' plan splits fused parameters along their experts, which a served model does not have.
All that follows the split is Transformers': experts are renumbered in each process, its
implementation of the exchange (`EPImplementationInterface`) wraps the experts module, and ids
beyond the last mean "elsewhere". A process reads, caches and forecasts its own experts only
(MoE-Infinity, sequence level, section 7).

All processes compute the same tokens and reduce their layer outputs collectively, so they must be
called alike. If one fails, the others wait until the timeout of `init_process_group`.
"""

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from runtime.errors import CheckpointError
from runtime.hf.adapters.base import ExpertSource, LayerExperts
from runtime.hf.adapters.fused import InterfaceAdapter
from runtime.hf.experts import find_accumulation
from runtime.hf.layers import MoeLayer
from runtime.policy.placement import ExpertPlacement, RankPart
from runtime.store.base import ExpertStore
from runtime.store.ggml.matrix import ExpertWeights


class RankExperts(LayerExperts):
    """This process's experts of one layer, numbered from 0 as its module numbers them."""

    def __init__(self, source: ExpertSource, layer: int, part: RankPart):
        super().__init__(source, layer)
        self._first = part.rank * part.blocks.block_size

    def in_place(self, wanted: list[int]) -> Iterator[dict[int, ExpertWeights]]:
        for batch in super().in_place([self._first + e for e in wanted]):
            yield {expert - self._first: weights for expert, weights in batch.items()}

    def pin(self, expert: int) -> dict[str, Tensor]:
        return super().pin(self._first + expert)


def find_own_part(
    layers: Sequence[MoeLayer], store: ExpertStore, *, has_devices: bool
) -> RankPart | None:
    """Return the experts that this process serves; None if it is the only process.

    Raises:
        CheckpointError: no processes, or a model that they cannot share.
    """
    if not (dist.is_available() and dist.is_initialized()):
        raise CheckpointError(
            "expert_parallel=True needs the processes to know of one another: start them with "
            "torchrun and call torch.distributed.init_process_group first"
        )
    if dist.get_world_size() == 1:
        return None
    if has_devices:
        raise CheckpointError(
            "expert_parallel and devices together: start one process for each device in place of "
            "devices"
        )
    if not all(
        isinstance(layer.adapter, InterfaceAdapter) and find_accumulation(layer.experts)
        for layer in layers
    ):
        raise CheckpointError(
            "this model's experts modules run their own loop, which Transformers' expert "
            "parallelism does not support; serve it from one process"
        )
    num_experts, world = store.num_experts, dist.get_world_size()
    if num_experts % world or set(store.experts_per_layer) != {num_experts}:
        raise CheckpointError(
            f"{world} processes cannot share layers of {sorted(set(store.experts_per_layer))} "
            "experts evenly; take a number of processes that divides them"
        )
    return RankPart(ExpertPlacement(world, block_size=num_experts // world), dist.get_rank())


def attach_own_experts(
    layers: Sequence[MoeLayer], source: ExpertSource, part: RankPart, device: torch.device
) -> list[LayerExperts]:
    """Let layers compute with this process's experts and exchange outputs between processes."""
    # Here, because a model that is served from one process has no use for it.
    from transformers.distributed.expert_parallel import EpDispatchExpertsParallel

    mesh = init_device_mesh(device.type, (part.blocks.num_devices,))
    attached: list[LayerExperts] = []
    for layer in layers:
        experts = RankExperts(source, layer.index, part)
        layer.adapter.attach(layer.experts, experts)
        attached.append(experts)
        module = layer.experts
        module.num_experts = part.blocks.block_size
        module._is_expert_parallel = True
        # The same mesh twice: the processes that share experts share every batch.
        EpDispatchExpertsParallel().install_forward(module, mesh, tp_mesh=mesh)
    return attached
