"""Which expert to drop when a slot is needed: one small file for each policy, bookkeeping only."""

from runtime.policy.eviction.protocol import (
    Evictable,
    Eviction,
    EvictionPolicy,
    Expert,
    Probabilities,
)
from runtime.policy.eviction.registry import eviction_policy

__all__ = ["Evictable", "Eviction", "EvictionPolicy", "Expert", "Probabilities", "eviction_policy"]
