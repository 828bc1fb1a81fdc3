"""The table of eviction policies."""

from collections.abc import Callable, Collection, Mapping
from types import MappingProxyType
from typing import Any

from predictors.errors import MoecastError, unknown
from runtime.policy.eviction.base import EvictionPolicy
from runtime.policy.eviction.belady import BeladyEviction
from runtime.policy.eviction.klotski import FirstLayersEviction
from runtime.policy.eviction.moe_infinity import (
    MoeInfinityRequestEviction,
    MoeInfinitySequenceEviction,
)
from runtime.policy.eviction.past_use import (
    FmoeEviction,
    LruEviction,
    NeighbourEviction,
    make_lfu,
)
from runtime.policy.eviction.regret import RegretEviction
from runtime.policy.eviction.reuse import ReuseEviction
from runtime.policy.eviction.static import StaticEviction

EVICTIONS: Mapping[str, Callable[..., EvictionPolicy]] = MappingProxyType(
    {
        "belady": BeladyEviction,
        "first-layers": FirstLayersEviction,
        "fmoe": FmoeEviction,
        "lfu": make_lfu,
        "lru": LruEviction,
        "moe-infinity-request": MoeInfinityRequestEviction,
        "moe-infinity-sequence": MoeInfinitySequenceEviction,
        "neighbour": NeighbourEviction,
        "regret": RegretEviction,
        "reuse": ReuseEviction,
        "static": StaticEviction,
    }
)
"""Name to constructor, whose arguments are the model's shape and the policy's options."""

OPTIONS: Mapping[str, Collection[str]] = MappingProxyType(
    {
        "belady": ("future", "known_steps"),
        "lfu": ("reset_on_eviction",),
        "static": ("counts", "warmup_steps", "buffers"),
    }
)
"""The options of the policies that have any."""


def make_eviction_policy(
    name: str,
    *,
    num_layers: int,
    num_experts: int,
    top_k: int = 1,
    options: Mapping[str, Any] | None = None,
) -> EvictionPolicy:
    """Makes a new policy for one cache.

    Args:
        name: One of `EVICTIONS`.
        num_layers: Layers of the model.
        num_experts: Experts of each layer.
        top_k: Experts that each token is routed to.
        options: Arguments of the policy.

    Raises:
        MoecastError: There is no such policy or option, or `belady` lacks the future routing.
    """
    if name not in EVICTIONS:
        raise MoecastError(unknown("eviction policy", name, EVICTIONS))
    given, known = dict(options or {}), OPTIONS.get(name, ())
    for option in given:
        if option not in known:
            raise MoecastError(unknown(f"option of {name} eviction", option, known))
    if name == "belady" and "future" not in given:
        raise MoecastError(
            "belady eviction needs the future routing: it is for replays of a trace only. "
            f"Choose another policy: {', '.join(sorted(set(EVICTIONS) - {'belady'}))}"
        )
    if name == "first-layers":
        given["top_k"] = top_k
    return EVICTIONS[name](num_layers=num_layers, num_experts=num_experts, **given)
