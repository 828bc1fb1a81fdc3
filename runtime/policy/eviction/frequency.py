"""Policies that score experts by how often they were used. Shape suffixes: L layers, E experts."""

from collections.abc import Mapping

import numpy as np

from runtime.policy.eviction.protocol import EvictionOrder, EvictionPolicy, Expert, Probabilities
from runtime.policy.eviction.score_order import ScoreOrder, Scores, view_scores

EPSILON = 1e-6
"""Lets the layer decay order experts whose ratio is 0, as in section 5.2; far below 1 / tokens."""


class ResettingOrder(ScoreOrder):
    """Lowest score first; the score of an evicted expert becomes 0."""

    def on_remove(self, expert: Expert) -> None:
        super().on_remove(expert)
        self._scores()[self.index(expert)] = 0.0


class LfuEviction(EvictionPolicy):
    """Evicts the expert that the fewest steps since the start requested, resident or not.

    BrainStorm's policy: MoE-Infinity (request level), section 7.3, model-level counts. Ties go to
    the least recently touched expert.

    Args:
        num_layers: Layers of the model.
        num_experts: Experts of each layer.
        reset_on_eviction: An evicted expert's count starts again from 0, as in the LFU baseline of
            MoE-Infinity (sequence level), section 8.4.
    """

    def __init__(self, *, num_layers: int, num_experts: int, reset_on_eviction: bool = False):
        self._score_LE = np.zeros((num_layers, num_experts))
        self._reset_on_eviction = reset_on_eviction

    def make_order(self, *, num_slots: int, layers: range) -> EvictionOrder:  # noqa: ARG002
        make = ResettingOrder if self._reset_on_eviction else ScoreOrder
        scores = view_scores(self._score_LE, layers)
        return make(scores, layers=layers, num_experts=self._score_LE.shape[1])

    def on_routed(self, layer: int, tokens_per_expert: Mapping[int, int]) -> None:
        self._score_LE[layer, list(tokens_per_expert)] += 1


class LfruEviction(EvictionPolicy):
    """Evicts the lowest `frequency / (age + 1)`: frequency and recency in one (LFRU).

    `frequency` counts the steps since the start that requested the expert, `age` the steps since
    the last of them (arXiv 2608.07911). Ties go to the least recently touched expert.
    """

    def __init__(self, *, num_layers: int, num_experts: int):
        self._frequency_LE = np.zeros((num_layers, num_experts))
        self._last_step_LE = np.zeros((num_layers, num_experts))
        self._step = 0

    def make_order(self, *, num_slots: int, layers: range) -> EvictionOrder:  # noqa: ARG002
        rows = slice(layers.start, layers.stop)

        def scores() -> Scores:
            age_LE = self._step - self._last_step_LE[rows]
            return (self._frequency_LE[rows] / (age_LE + 1.0)).reshape(-1)

        return ScoreOrder(scores, layers=layers, num_experts=self._frequency_LE.shape[1])

    def begin_step(self, new_request: bool) -> None:  # noqa: ARG002
        self._step += 1

    def on_routed(self, layer: int, tokens_per_expert: Mapping[int, int]) -> None:
        chosen = list(tokens_per_expert)
        self._frequency_LE[layer, chosen] += 1
        self._last_step_LE[layer, chosen] = self._step


class FmoeEviction(LfuEviction):
    """Evicts the expert with the highest `1 / (p * freq)` (fMoE, section 4.5).

    `p` is the latest forecast of the expert (in fMoE: the expert map's that the search found), 1
    before any. `freq` counts the steps that visited the expert since the start; an eviction does
    not reset it. Ties go to the least recently touched expert.
    """

    def __init__(self, *, num_layers: int, num_experts: int):
        super().__init__(num_layers=num_layers, num_experts=num_experts)
        self._probability_LE = np.ones((num_layers, num_experts))
        self._visits_LE = np.zeros((num_layers, num_experts))

    def on_routed(self, layer: int, tokens_per_expert: Mapping[int, int]) -> None:
        self._visits_LE[layer, list(tokens_per_expert)] += 1
        self._score_LE[layer] = self._probability_LE[layer] * self._visits_LE[layer]

    def on_forecast(self, layer: int, probability_E: Probabilities) -> None:
        self._probability_LE[layer] = probability_E
        self._score_LE[layer] = self._probability_LE[layer] * self._visits_LE[layer]


def layer_decay(num_layers: int) -> np.ndarray:
    """Returns `[L]`: `1 - l / L`, linear, which favours experts nearer the first layer."""
    return 1.0 - np.arange(num_layers) / num_layers


class MoeInfinitySequenceEviction(LfuEviction):
    """Evicts the lowest `(ratio + epsilon) * (1 - l / L)`.

    MoE-Infinity (sequence level), algorithm 2. `ratio` is the expert's share of its layer's tokens
    in the current EAM, which is empty when a sequence starts and is updated as soon as a router has
    run (algorithm 1, steps 2, 6 and 7). Ties go to the least recently touched expert.
    """

    def __init__(self, *, num_layers: int, num_experts: int):
        super().__init__(num_layers=num_layers, num_experts=num_experts)
        self._eam_LE = np.zeros((num_layers, num_experts))
        self._decay_L = layer_decay(num_layers)
        self.begin_step(new_request=True)

    def begin_step(self, new_request: bool) -> None:
        if new_request:
            self._eam_LE[:] = 0.0
            self._score_LE[:] = EPSILON * self._decay_L[:, None]

    def on_routed(self, layer: int, tokens_per_expert: Mapping[int, int]) -> None:
        if not tokens_per_expert:
            return
        eam_E = self._eam_LE[layer]
        eam_E[list(tokens_per_expert)] += list(tokens_per_expert.values())
        ratio_E = eam_E / eam_E.sum()
        self._score_LE[layer] = (ratio_E + EPSILON) * self._decay_L[layer]
