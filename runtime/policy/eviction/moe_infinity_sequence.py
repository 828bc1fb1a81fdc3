"""Eviction by the activation ratios of the running sequences.

Shape suffixes: T tokens of the step, K top_k, R requests of the step, L layers, E experts.
"""

from predictors.base import Ints
from predictors.eam.collection import activation_ratios
from runtime.policy.eviction.live_eams import EPSILON, LiveEams, layer_decay
from runtime.policy.eviction.protecting import ProtectingEviction


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
