"""A system's policy core from its configuration: the same for live runs and for simulated ones."""

from collections.abc import Sequence

from predictors.spec import ModelSpec
from runtime.config import SystemConfig
from runtime.policy.cache import ExpertCache
from runtime.policy.eviction import eviction
from runtime.policy.prefetcher import Prefetcher, Techniques


def build_prefetcher(
    system: SystemConfig,
    spec: ModelSpec,
    *,
    num_slots: int,
    chunk_bytes: Sequence[Sequence[int]],
) -> Prefetcher:
    """Cache, queue and techniques for an arena of `num_slots` experts.

    `chunk_bytes` are those of each layer.

    The arena is divided among the layers only where it holds a step's experts of every one.
    """
    per_layer = system.per_layer and num_slots >= spec.num_layers * spec.top_k
    cache = ExpertCache(
        num_slots=num_slots,
        num_layers=spec.num_layers,
        per_layer=per_layer,
        eviction=eviction(system.eviction),
    )
    return Prefetcher(
        cache,
        chunk_bytes=chunk_bytes,
        techniques=Techniques(
            chunked=system.chunked,
            early_preemption=system.early_preemption,
            reordered=system.reordered,
        ),
    )
