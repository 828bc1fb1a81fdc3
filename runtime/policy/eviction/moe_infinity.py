"""Eviction as in both MoE-Infinity papers: by what the running requests used, prefetches last.

Shape suffixes: T tokens of the step, K top_k, R requests of the step, S request slots, L layers,
E experts, N = experts of the partition's layers.
"""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from predictors.base import Ints
from predictors.eam.collection import activation_ratios, count_rows
from predictors.requests import LiveRequests, StepRequests, grow_rows
from runtime.policy.eviction.base import (
    PROTECTED,
    EvictionPolicy,
    Expert,
    Probabilities,
    Scores,
    view_scores,
)

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


class ProtectingEviction(EvictionPolicy):
    """Evicts the lowest score; a prefetched expert ranks above all others until it is used.

    MoE-Infinity (sequence level), section 6.2: "we need to give priority to prefetched experts over
    those already cached"; (request level), section 5.2: "we need to protect being prefetched
    experts from eviction". The protection ends when the router of the expert's layer requests it
    (its pin keeps it until it has been computed) or chooses others.
    """

    def __init__(self, *, num_layers: int, num_experts: int):
        super().__init__(num_layers=num_layers, num_experts=num_experts)
        self.bonus_LE = np.zeros((num_layers, num_experts))
        """`PROTECTED` for the experts that are, 0 for all others."""
        self.layer_now = -1
        """The last layer whose router has run in this step."""

    def scores(self) -> Scores:
        return self.score_N + self.bonus_LE.reshape(-1)

    def on_prefetch(self, expert: Expert) -> None:
        self.bonus_LE[expert] = PROTECTED

    def on_use(self, expert: Expert) -> None:
        super().on_use(expert)
        self.bonus_LE[expert] = 0.0

    def on_remove(self, expert: Expert) -> None:
        super().on_remove(expert)
        self.bonus_LE[expert] = 0.0

    def clear(self) -> None:
        super().clear()
        self.bonus_LE[:] = 0.0

    def on_routed(self, layer: int, tokens_per_expert: Mapping[int, int]) -> None:
        # The previous layer's choices have been computed, even if a tier above had them.
        self._unprotect_layer()
        self.layer_now = layer
        chosen = list(tokens_per_expert)
        bonus_K = self.bonus_LE[layer, chosen]
        self._unprotect_layer()
        self.bonus_LE[layer, chosen] = bonus_K

    def _unprotect_layer(self) -> None:
        if self.layer_now >= 0:
            self.bonus_LE[self.layer_now] = 0.0

    def may_evict_for(self, victim: Expert, newcomer: Expert) -> bool:  # noqa: ARG002
        """Returns False for a protected expert: it was fetched before, so it is needed more."""
        return not self.bonus_LE[victim]

    def end_step(self) -> None:
        self._unprotect_layer()
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

    def on_forecast(self, layer: int, probability_E: Probabilities, order_E: Probabilities) -> None:  # noqa: ARG002
        proximity = 1.0 - (layer - max(0, self.layer_now)) / len(self._decay_L)
        self.priority_LE[layer] = np.asarray(order_E, np.float64) * proximity
        for num_slots, layers in self.partitions:
            if layer in layers:
                self._unprotect_outranked(num_slots, layers)

    def _unprotect_outranked(self, num_slots: int, layers: range) -> None:
        """Ends the protection of experts that newer forecasts rank below the first `num_slots`."""
        priority_N, bonus_N = (view_scores(a, layers) for a in (self.priority_LE, self.bonus_LE))
        is_protected_N = bonus_N > 0
        if num_slots >= len(priority_N) or not is_protected_N.any():
            return
        # Counting is much cheaper than finding the K-th, and mostly none is outranked.
        if np.count_nonzero(priority_N > priority_N[is_protected_N].min()) >= num_slots:
            least = np.partition(priority_N, -num_slots)[-num_slots]
            bonus_N[is_protected_N & (priority_N < least)] = 0.0

    def end_step(self) -> None:
        super().end_step()
        self._eams.counts_SLE[self._eams.present.slots_R] += self._iteration_RLE
        self._eams.end_step()
