"""Request-level EAM counts; what is being prefetched is protected.

Shape suffixes: L layers, E experts, N = experts of the part's layers.
"""

from collections.abc import Collection, Mapping

import numpy as np

from runtime.policy.eviction.moe_infinity_sequence import EPSILON, layer_decay
from runtime.policy.eviction.protocol import (
    Eviction,
    EvictionPolicy,
    Expert,
    Probabilities,
)
from runtime.policy.eviction.scored import KEEP, Scored, of_layers


class Buffer(Scored):
    """One GPU's buffer: which experts in it have been prefetched and still await their router."""

    def __init__(self, policy: "MoeInfinityRequest", *, num_slots: int, layers: range):
        scores = of_layers(policy.priority_LE, layers)
        super().__init__(scores, layers=layers, num_experts=policy.priority_LE.shape[1])
        self._policy = policy
        self._num_slots = num_slots
        self._layers = layers
        self._awaited: dict[int, set[int]] = {layer: set() for layer in layers}

    def admitted(self, expert: Expert) -> None:
        super().admitted(expert)
        if not self._policy.is_asked_for(expert):
            self._awaited[expert[0]].add(expert[1])
            self._policy.priority_LE[expert] = KEEP

    def used(self, expert: Expert) -> None:
        super().used(expert)
        self._reset(expert)

    def removed(self, expert: Expert) -> None:
        super().removed(expert)
        self._reset(expert)

    def settle(self, layer: int, chosen: Collection[int]) -> None:
        """Scenario (ii): what was prefetched for the layer and not chosen loses its protection."""
        for e in self._awaited[layer].difference(chosen):
            self._reset((layer, e))

    def forecast(self) -> None:
        """Scenario (iii): so does what is not among the K most wanted, K the number of slots."""
        awaited = [(layer, e) for layer, experts in self._awaited.items() for e in experts]
        if not awaited:
            return
        wanted_N = self._policy.wanted_LE[self._layers.start : self._layers.stop].reshape(-1)
        if self._num_slots >= len(wanted_N):
            return
        least = np.partition(wanted_N, -self._num_slots)[-self._num_slots]
        for expert in awaited:
            if self._policy.wanted_LE[expert] < least:
                self._reset(expert)

    def _reset(self, expert: Expert) -> None:
        awaited = self._awaited[expert[0]]
        if expert[1] in awaited:
            awaited.remove(expert[1])
            self._policy.reset(expert)


class MoeInfinityRequest(EvictionPolicy):
    """moe-infinity-request-level 5.2: the lowest count in the request-level EAM goes.

    Iterations, the prefill among them, are added to the EAM when they end; it starts empty with
    each request. The first layers are favoured by the sequence-level paper's decay,
    `(count + epsilon) * (1 - l / L)`: this paper asks for it and gives no formula. A prefetched
    expert has the highest priority until (i) its router asks for it (its pin keeps it until it has
    been computed), (ii) its layer is routed without it, or (iii) newer forecasts, weighted with
    `1 - (i - l) / L`, leave it out of the K most wanted. Ties go to the least recently touched.
    """

    def __init__(self, *, num_layers: int, num_experts: int):
        shape = num_layers, num_experts
        self._iteration_LE = np.zeros(shape)
        self._request_LE = np.zeros(shape)
        self._decay_L = layer_decay(num_layers)
        self.priority_LE = np.zeros(shape)
        self.wanted_LE = np.zeros(shape)
        """Prefetching priority of experts of layers still to come (5.1), from this iteration."""
        self._layer_now = -1
        self._chosen: Mapping[int, int] = {}
        self._part_of: dict[int, Buffer] = {}
        """By layer."""
        self._recompute()

    def part(self, *, num_slots: int, layers: range) -> Eviction:
        part = Buffer(self, num_slots=num_slots, layers=layers)
        self._part_of.update(dict.fromkeys(layers, part))
        return part

    def is_asked_for(self, expert: Expert) -> bool:
        """By the router that spoke last."""
        return expert[0] == self._layer_now and expert[1] in self._chosen

    def reset(self, expert: Expert) -> None:
        """Back to what the request-level EAM says."""
        count = float(self._request_LE[expert])
        self.priority_LE[expert] = (count + EPSILON) * self._decay_L[expert[0]]

    def _recompute(self) -> None:
        awaited_LE = self.priority_LE == KEEP
        self.priority_LE[:] = (self._request_LE + EPSILON) * self._decay_L[:, None]
        self.priority_LE[awaited_LE] = KEEP

    def begin_step(self, new_request: bool) -> None:
        self._iteration_LE[:] = 0.0
        self.wanted_LE[:] = 0.0
        if new_request:
            self._request_LE[:] = 0.0
            self._recompute()

    def routed(self, layer: int, tokens_per_expert: Mapping[int, int]) -> None:
        # What the last layer chose has been computed, also where the tier above had it.
        self._settle(self._layer_now, ())
        self._layer_now = layer
        self._chosen = tokens_per_expert
        self._iteration_LE[layer, list(tokens_per_expert)] += list(tokens_per_expert.values())
        self.wanted_LE[layer] = 0.0
        self._settle(layer, tokens_per_expert)

    def _settle(self, layer: int, chosen: Collection[int]) -> None:
        if layer in self._part_of:
            self._part_of[layer].settle(layer, chosen)

    def forecast(self, layer: int, probability_E: Probabilities) -> None:
        proximity = 1.0 - (layer - max(0, self._layer_now)) / len(self._decay_L)
        self.wanted_LE[layer] = np.asarray(probability_E) * proximity
        self._part_of[layer].forecast()

    def end_step(self) -> None:
        self._settle(self._layer_now, ())
        self._layer_now = -1
        self._chosen = {}
        self._request_LE += self._iteration_LE
        self._recompute()
