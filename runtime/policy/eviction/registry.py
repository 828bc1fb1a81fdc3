"""Every eviction policy by name."""

import inspect
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from predictors.errors import MoecastError, unknown
from runtime.policy.eviction.belady import Belady
from runtime.policy.eviction.decayed_lfu import DecayedLfu
from runtime.policy.eviction.fifo import Fifo
from runtime.policy.eviction.fmoe import Fmoe
from runtime.policy.eviction.least_stale import LeastStale
from runtime.policy.eviction.lfu import Lfu
from runtime.policy.eviction.lru import Lru
from runtime.policy.eviction.moe_infinity_request import MoeInfinityRequest
from runtime.policy.eviction.moe_infinity_sequence import MoeInfinitySequence
from runtime.policy.eviction.neighbour import Neighbour
from runtime.policy.eviction.protocol import EvictionPolicy
from runtime.policy.eviction.reuse import Reuse
from runtime.policy.eviction.static import Static

EVICTIONS: Mapping[str, Callable[..., EvictionPolicy]] = MappingProxyType(
    {
        "belady": Belady,
        "decayed-lfu": DecayedLfu,
        "fifo": Fifo,
        "fmoe": Fmoe,
        "least-stale": LeastStale,
        "lfu": Lfu,
        "lru": Lru,
        "moe-infinity-request": MoeInfinityRequest,
        "moe-infinity-sequence": MoeInfinitySequence,
        "neighbour": Neighbour,
        "reuse": Reuse,
        "static": Static,
    }
)
"""Name to constructor; what it takes beside the model's shape are the policy's options."""


def eviction_policy(
    name: str, *, num_layers: int, num_experts: int, options: Mapping[str, Any] | None = None
) -> EvictionPolicy:
    """A new policy for one cache.

    Raises:
        MoecastError: no such policy or option, or `belady` without the future.
    """
    if name not in EVICTIONS:
        raise MoecastError(unknown("eviction policy", name, EVICTIONS))
    make, given = EVICTIONS[name], dict(options or {})
    shape = {"num_layers": num_layers, "num_experts": num_experts}
    known = {*inspect.signature(make).parameters} - {"self", "args", "kwargs"}
    for option in given:
        if option not in known - shape.keys():
            raise MoecastError(unknown(f"option of {name} eviction", option, known - shape.keys()))
    if name == "belady" and "future" not in given:
        raise MoecastError(
            "belady eviction needs to know the future routing: it is for replays of a trace. "
            f"Live, choose another: {', '.join(sorted(set(EVICTIONS) - {'belady'}))}"
        )
    return make(**{key: value for key, value in shape.items() if key in known}, **given)
