"""The table of eviction policies."""

import inspect
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from predictors.errors import MoecastError, unknown
from runtime.policy.eviction.belady import BeladyEviction
from runtime.policy.eviction.frequency import FmoeEviction, LfuEviction
from runtime.policy.eviction.klotski import FirstLayersEviction
from runtime.policy.eviction.moe_infinity import (
    MoeInfinityRequestEviction,
    MoeInfinitySequenceEviction,
)
from runtime.policy.eviction.protocol import EvictionPolicy
from runtime.policy.eviction.recency import LruEviction, NeighbourEviction
from runtime.policy.eviction.regret import RegretEviction
from runtime.policy.eviction.reuse import ReuseEviction
from runtime.policy.eviction.static import StaticEviction


def make_reuse_eviction(*, num_layers: int, num_experts: int) -> EvictionPolicy:
    """Makes a `ReuseEviction`; a compiled class does not tell its arguments."""
    return ReuseEviction(num_layers=num_layers, num_experts=num_experts)


EVICTIONS: Mapping[str, Callable[..., EvictionPolicy]] = MappingProxyType(
    {
        "belady": BeladyEviction,
        "first-layers": FirstLayersEviction,
        "fmoe": FmoeEviction,
        "lfu": LfuEviction,
        "lru": LruEviction,
        "moe-infinity-request": MoeInfinityRequestEviction,
        "moe-infinity-sequence": MoeInfinitySequenceEviction,
        "neighbour": NeighbourEviction,
        "regret": RegretEviction,
        "reuse": make_reuse_eviction,
        "static": StaticEviction,
    }
)
"""Name to constructor, whose arguments other than the model's shape are the policy's options."""


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
    make, given = EVICTIONS[name], dict(options or {})
    shape = {"num_layers": num_layers, "num_experts": num_experts, "top_k": top_k}
    known = _list_arguments(make)
    for option in given:
        if option not in known - shape.keys():
            raise MoecastError(unknown(f"option of {name} eviction", option, known - shape.keys()))
    if name == "belady" and "future" not in given:
        raise MoecastError(
            "belady eviction needs the future routing: it is for replays of a trace only. "
            f"Choose another policy: {', '.join(sorted(set(EVICTIONS) - {'belady'}))}"
        )
    return make(**{key: value for key, value in shape.items() if key in known}, **given)


def _list_arguments(make: Callable[..., EvictionPolicy]) -> set[str]:
    """Returns the names of a constructor's arguments."""
    if inspect.isclass(make):
        # A class without a constructor takes none; the base class may be compiled.
        constructors = (vars(cls).get("__init__") for cls in make.__mro__)
        constructor = next(filter(callable, constructors))
        if constructor in (object.__init__, vars(EvictionPolicy).get("__init__")):
            return set()
        return {*inspect.signature(constructor).parameters} - {"self"}
    return {*inspect.signature(make).parameters}
