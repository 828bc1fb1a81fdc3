"""Eviction as in both MoE-Infinity papers: by what the running requests used, prefetches last.

Shape suffixes: T tokens of the step, K top_k, R requests of the step, S request slots, L layers,
E experts, N = experts of the partition's layers.
"""

from collections.abc import Collection, Mapping

import numpy as np
from numpy.typing import NDArray

from predictors.base import Ints
from predictors.eam.collection import activation_ratios, count_rows
from predictors.requests import LiveRequests, StepRequests, grow_rows
from runtime.policy.eviction.protocol import EvictionOrder, EvictionPolicy, Expert, Probabilities
from runtime.policy.eviction.score_order import PROTECTED, ScoreOrder, Scores, view_scores

EPSILON = 1e-6
"""Lets the layer decay order experts without uses (MoE-Infinity, sequence level, section 5.2); far
below the ratio of one token."""


def layer_decay(num_layers: int) -> NDArray[np.float64]:
    """Returns `[L]`: `1 - l / L`, linear, which favours experts nearer the first layer."""
    return 1.0 - np.arange(num_layers) / num_layers


class LiveEams:
    """One matrix of token counts for each running request.

    "For handling multiple sequences, we record separate EAMs" (MoE-Infinity, sequence level,
    section 1). A request that waits for the prompt of another keeps its matrix.
    """

    def __init__(self, *, num_layers: int, num_experts: int):
        self.counts_SLE = np.zeros((1, num_layers, num_experts))
        self.present = StepRequests(np.zeros(0, np.int64), np.zeros(0, np.int64), [])
        """The requests of this step."""
        self._requests = LiveRequests()

    @property
    def counts_RLE(self) -> NDArray[np.float64]:
        """The matrices of the step's requests."""
        return self.counts_SLE[self.present.slots_R]

    def begin_step(self, requests_T: Ints) -> None:
        """Begins a step; requests that were not running get an empty matrix."""
        self.present = self._requests.begin_step(requests_T)
        self.counts_SLE = grow_rows(self.counts_SLE, self._requests.num_slots)
        self.counts_SLE[self.present.new] = 0.0

    def count(self, experts_TK: Ints) -> NDArray[np.float32]:
        """Returns `[R, E]`: the tokens that each request routes to each expert of a layer."""
        present, num_experts = self.present, self.counts_SLE.shape[-1]
        return count_rows(experts_TK, present.request_T, present.num_requests, num_experts)

    def end_step(self) -> None:
        """Forgets the requests that have ended."""
        self._requests.release_ended()


class ProtectingOrder(ScoreOrder):
    """Lowest score first; prefetched experts that still await their router come last."""

    def __init__(self, score_LE: Scores, layers: range, num_slots: int):
        super().__init__(score_LE, layers)
        self._layers = layers
        self._num_slots = num_slots
        self._bonus_N = np.zeros(len(self.score_N))
        self._awaiting: dict[int, set[int]] = {layer: set() for layer in layers}

    def scores(self) -> Scores:
        return self.score_N + self._bonus_N

    @property
    def awaiting(self) -> Collection[Expert]:
        """The protected experts."""
        return [(layer, e) for layer, experts in self._awaiting.items() for e in experts]

    def on_prefetch(self, expert: Expert) -> None:
        self._awaiting[expert[0]].add(expert[1])
        self._bonus_N[self.index(expert)] = PROTECTED

    def on_use(self, expert: Expert) -> None:
        super().on_use(expert)
        self.unprotect(expert)

    def on_remove(self, expert: Expert) -> None:
        super().on_remove(expert)
        self.unprotect(expert)

    def clear(self) -> None:
        super().clear()
        for expert in self.awaiting:
            self.unprotect(expert)

    def is_protected(self, expert: Expert) -> bool:
        return expert[1] in self._awaiting[expert[0]]

    def unprotect(self, expert: Expert) -> None:
        self._awaiting[expert[0]].discard(expert[1])
        self._bonus_N[self.index(expert)] = 0.0

    def unprotect_others(self, layer: int, chosen: Collection[int]) -> None:
        """Ends the protection of the layer's experts that were not chosen."""
        for e in self._awaiting[layer].difference(chosen):
            self.unprotect((layer, e))

    def unprotect_outranked(self, priority_LE: Scores) -> None:
        """Ends the protection of experts that newer forecasts rank below the first K.

        Scenario (iii) of MoE-Infinity (request level), section 5.2; K is the number of slots.
        """
        awaiting, priority_N = self.awaiting, view_scores(priority_LE, self._layers)
        if not awaiting or self._num_slots >= len(priority_N):
            return
        lowest = min([priority_LE[expert] for expert in awaiting])
        # Counting is much cheaper than finding the K-th, and mostly none is outranked.
        if np.count_nonzero(priority_N > lowest) < self._num_slots:
            return
        least = np.partition(priority_N, -self._num_slots)[-self._num_slots]
        for expert in awaiting:
            if priority_LE[expert] < least:
                self.unprotect(expert)


class ProtectingEviction(EvictionPolicy):
    """Evicts the lowest score; a prefetched expert ranks above all others until it is used.

    MoE-Infinity (sequence level), section 6.2: "we need to give priority to prefetched experts over
    those already cached"; (request level), section 5.2: "we need to protect being prefetched
    experts from eviction". The protection ends when the router of the expert's layer requests it
    (its pin keeps it until it has been computed) or chooses others.
    """

    def __init__(self, *, num_layers: int, num_experts: int):
        self.score_LE = np.zeros((num_layers, num_experts))
        self.layer_now = -1
        """The last layer whose router has run in this step."""
        self._order_of_layer: dict[int, ProtectingOrder] = {}

    def make_order(self, *, num_slots: int, layers: range) -> EvictionOrder:
        order = ProtectingOrder(self.score_LE, layers, num_slots)
        self._order_of_layer.update(dict.fromkeys(layers, order))
        return order

    def on_routed(self, layer: int, tokens_per_expert: Mapping[int, int]) -> None:
        # The previous layer's choices have been computed, even if a tier above had them.
        self._unprotect_others(self.layer_now, ())
        self.layer_now = layer
        self._unprotect_others(layer, tokens_per_expert)

    def _unprotect_others(self, layer: int, chosen: Collection[int]) -> None:
        if layer in self._order_of_layer:
            self._order_of_layer[layer].unprotect_others(layer, chosen)

    def may_evict_for(self, victim: Expert, newcomer: Expert) -> bool:  # noqa: ARG002
        """Returns False for a protected expert: it was fetched before, so it is needed more."""
        return not self._order_of_layer[victim[0]].is_protected(victim)

    def end_step(self) -> None:
        self._unprotect_others(self.layer_now, ())
        self.layer_now = -1


class MoeInfinitySequenceEviction(ProtectingEviction):
    """Evicts the lowest `(ratio + epsilon) * (1 - l / L)`, prefetched experts last.

    MoE-Infinity (sequence level), algorithm 2. `ratio` is the expert's share of its layer's tokens
    in the current EAM, which is empty when a sequence starts and is updated as soon as a router has
    run (algorithm 1, steps 2, 6 and 7). Each sequence has its own EAM (section 1); with several in
    a step, the ratio is the mean over them, as the priorities of prefetching are. Ties go to the
    least recently touched expert.
    """

    def __init__(self, *, num_layers: int, num_experts: int):
        super().__init__(num_layers=num_layers, num_experts=num_experts)
        self._eams = LiveEams(num_layers=num_layers, num_experts=num_experts)
        self._decay_L = layer_decay(num_layers)
        self.score_LE[:] = EPSILON * self._decay_L[:, None]
        self._slots: list[int] = []
        """Slots of the previous step's requests."""

    def begin_step(self, requests_T: Ints) -> None:
        self._eams.begin_step(requests_T)
        present = self._eams.present
        slots = present.slots_R.tolist()
        if present.new or slots != self._slots:
            ratio_LE = activation_ratios(self._eams.counts_RLE).mean(axis=0)
            self.score_LE[:] = (ratio_LE + EPSILON) * self._decay_L[:, None]
            self._slots = slots

    def on_tokens_routed(self, layer: int, experts_TK: Ints) -> None:
        slots_R = self._eams.present.slots_R
        self._eams.counts_SLE[slots_R, layer] += self._eams.count(experts_TK)
        ratio_E = activation_ratios(self._eams.counts_SLE[slots_R, layer]).mean(axis=0)
        self.score_LE[layer] = (ratio_E + EPSILON) * self._decay_L[layer]

    def end_step(self) -> None:
        super().end_step()
        self._eams.end_step()


class MoeInfinityRequestEviction(ProtectingEviction):
    """Evicts the lowest count in the request-level EAM (MoE-Infinity, request level, section 5.2).

    Iterations, the prefill among them, are added to the EAM when they end; it is empty when a
    request starts. Each request has its own; with several in a step, their counts are added. The
    first layers are favoured by the sequence-level paper's decay,
    `(count + epsilon) * (1 - l / L)`: this paper asks for it and gives no formula. A prefetched
    expert has the highest score until (i) its router requests it, (ii) its layer is routed without
    it, or (iii) newer forecasts, weighted with `1 - (i - l) / L`, leave it out of the first K. Ties
    go to the least recently touched expert.
    """

    def __init__(self, *, num_layers: int, num_experts: int):
        super().__init__(num_layers=num_layers, num_experts=num_experts)
        self._eams = LiveEams(num_layers=num_layers, num_experts=num_experts)
        self._iteration_RLE = np.zeros((1, num_layers, num_experts))
        self._decay_L = layer_decay(num_layers)
        self.priority_LE = np.zeros((num_layers, num_experts))
        """Prefetching priority of experts of later layers (section 5.1), of this iteration."""

    def begin_step(self, requests_T: Ints) -> None:
        self._eams.begin_step(requests_T)
        count_LE = self._eams.counts_RLE.sum(axis=0)
        self.score_LE[:] = (count_LE + EPSILON) * self._decay_L[:, None]
        self._iteration_RLE = np.zeros((self._eams.present.num_requests, *self.score_LE.shape))
        self.priority_LE[:] = 0.0

    def on_tokens_routed(self, layer: int, experts_TK: Ints) -> None:
        self._iteration_RLE[:, layer] += self._eams.count(experts_TK)

    def on_routed(self, layer: int, tokens_per_expert: Mapping[int, int]) -> None:
        super().on_routed(layer, tokens_per_expert)
        self.priority_LE[layer] = 0.0

    def on_forecast(self, layer: int, probability_E: Probabilities) -> None:
        proximity = 1.0 - (layer - max(0, self.layer_now)) / len(self._decay_L)
        self.priority_LE[layer] = np.asarray(probability_E, np.float64) * proximity
        self._order_of_layer[layer].unprotect_outranked(self.priority_LE)

    def end_step(self) -> None:
        super().end_step()
        self._eams.counts_SLE[self._eams.present.slots_R] += self._iteration_RLE
        self._eams.end_step()
