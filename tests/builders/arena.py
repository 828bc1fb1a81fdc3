"""Drives a cache as the runtime does, without transfers: what is missing arrives at once."""

import random

import numpy as np

from runtime.policy.cache import ExpertCache
from runtime.policy.eviction.base import EvictionPolicy
from runtime.policy.eviction.registry import make_eviction_policy

Routing = list[list[list[int]]]
"""For each step and layer, the chosen experts."""


def random_routing(seed: int, *, steps: int, layers: int, experts: int, top_k: int, turn=20):
    """Skewed choices whose favourites change every `turn` steps."""
    rng = random.Random(seed)
    weights = [1 / (rank + 1) for rank in range(experts)]
    routing: Routing = []
    for step in range(steps):
        if step % turn == 0:
            order = [rng.sample(range(experts), experts) for _ in range(layers)]
        chosen = []
        for layer in range(layers):
            some: set[int] = set()
            while len(some) < top_k:
                some.update(rng.choices(order[layer], weights))
            chosen.append(sorted(some))
        routing.append(chosen)
    return routing


def serve(policy: EvictionPolicy, routing: Routing, *, slots: int, per_layer: bool) -> list:
    """The experts that were missing in each step, in order.

    A layer's resident experts are used and pinned, then the others are admitted, then all unpinned;
    more than fits streams through.
    """
    sizes = {"num_slots": slots, "num_layers": len(routing[0])}
    cache = ExpertCache(**sizes, per_layer=per_layer, policy=policy)
    missed = []
    for layers in routing:
        missing: list[tuple[int, int]] = []
        cache.policy.begin_step(np.array([1]))
        for layer, chosen in enumerate(layers):
            cache.policy.on_tokens_routed(layer, np.array([chosen]))
            cache.policy.on_routed(layer, dict.fromkeys(chosen, 1))
            pinned = []
            for e in chosen:
                entry = cache.entries.get((layer, e))
                if entry is None:
                    missing.append((layer, e))
                    continue
                entry.pins += 1
                cache.policy.on_use((layer, e))
                pinned.append(entry)
            for e in chosen:
                if cache.entries.get((layer, e)) is not None:
                    continue
                entry, _ = cache.admit((layer, e))
                if entry is None:
                    pinned.pop(0).pins -= 1
                    entry, _ = cache.admit((layer, e))
                assert entry is not None
                entry.pins += 1
                pinned.append(entry)
            for entry in pinned:
                entry.pins -= 1
        cache.policy.end_step()
        missed.append(missing)
    return missed


def policy_of(name: str, layers: int = 2, experts: int = 4, **options) -> EvictionPolicy:
    """Makes a policy for a small model."""
    return make_eviction_policy(name, num_layers=layers, num_experts=experts, options=options)
