"""Eviction without training: the best of several counts, chosen by what each would have hit.

From top to bottom: small caches of ids that tell which counts would have hit most, the counts as
the share of steps that use an expert, and the policy, which discounts them by the time until a
layer comes.

Shape suffixes: L layers, E experts, A arms, K experts chosen in the step.
"""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from predictors.base import Ints
from runtime.policy.eviction.base import COMPILED, EvictionPolicy, Scores

DECAYS = (0.5, 0.8, 0.9, 0.95, 0.98, 1.0)
"""Factors per step. Up to .5 the last step to use an expert decides, as in LRU; 1 is LFU."""

LARGEST_WEIGHT = 1e100
"""Scores are rescaled above this weight: sums stay far from the largest double."""

BLENDED = {0.5: 0.2, 0.9: 0.3, 0.98: 0.5}
"""Decays and weights of the arm `blend`: an expert used lately and one used often both stay."""

DECAY_NAMES = {0.5: "lru", 1.0: "lfu"}
"""At a decay of .5 the last step to use an expert decides; at 1 all steps count alike."""

ARMS = ("blend", "lfru", *(DECAY_NAMES.get(decay, f"decayed-lfu {decay}") for decay in DECAYS))
"""Scores that compete; the first is followed before anything was measured."""

SURE = 2.0
"""Standard deviations of its hits, the square root of their number, by which another arm must lead
to be followed instead: the best of several equal arms leads by chance. With less, at a budget of
10 % the hit rate fell from .588 to .560 (Qwen3-30B-A3B's routing) and from .399 to .365 (the
reference model's)."""

MEMORY = 0.998
"""Factor per step on the arms' past hits: a memory of some five hundred steps, which notices a
change and does not swap two equally good arms back and forth."""

NUM_SAMPLED_LAYERS = 4
"""Layers with ghost caches, evenly spread; they stand for all layers."""

LEAST_SHARE = 1e-6
"""Share of steps that an expert without uses is given: far below one use in any log."""


class LayerGhost:
    """The experts that one layer's share of the cache would hold under each arm."""

    def __init__(self, num_experts: int, num_arms: int):
        self.num_slots = num_experts
        self._num_experts = num_experts
        self._num_arms = num_arms
        self._resident_EA = np.zeros((num_experts, num_arms), dtype=bool)
        self._is_resident_EA = self._resident_EA.view(np.uint8)
        self._no_hits_A = np.zeros(num_arms, dtype=np.int64)
        self._hits_A = np.zeros(num_arms, dtype=np.int64)
        self._num_hits_A = self._hits_A
        # Distinct factors next to 1: equal scores must not make a ghost larger than its slots.
        self._tie_E = 1.0 - 1e-9 * np.arange(num_experts)
        self._key_E = np.empty(num_experts)
        self._lowest_E = np.empty(num_experts)

    def serve(self, chosen_K: list[int], score_EA: Scores) -> NDArray[np.int64]:
        """Admits the chosen experts and evicts the lowest scores.

        Returns `[A]` hits, to be read before the next call.
        """
        if COMPILED and len(chosen_K) < self.num_slots:
            self._serve(chosen_K, score_EA)
            return self._hits_A
        is_hit_KA = self._resident_EA[chosen_K]
        if len(chosen_K) >= self.num_slots:
            # More than fits: the best of them stay, and the hits are no evidence of what to keep.
            key_EA = np.full_like(score_EA, -1.0)
            key_EA[chosen_K] = (score_EA * self._tie_E[:, None])[chosen_K]
            self._keep(key_EA)
            return self._no_hits_A
        if not is_hit_KA.all():
            key_EA = np.where(self._resident_EA, score_EA * self._tie_E[:, None], -1.0)
            key_EA[chosen_K] = np.inf
            self._keep(key_EA)
        return np.add.reduce(is_hit_KA, axis=0, dtype=np.int64)

    def _serve(self, chosen_K: list[int], score_EA: Scores) -> None:
        """Does what `serve` does, arm by arm, and sets `_hits_A`."""
        num_dropped, missed = self._num_experts - self.num_slots, False
        for a in range(self._num_arms):
            num_hits = 0
            for e in chosen_K:
                num_hits += self._is_resident_EA[e, a]
            self._num_hits_A[a] = num_hits
            missed = missed or num_hits < len(chosen_K)
        if not missed:
            return
        for a in range(self._num_arms):
            num_absent = 0
            for e in range(self._num_experts):
                if self._is_resident_EA[e, a]:
                    self._key_E[e] = score_EA[e, a] * self._tie_E[e]
                else:
                    self._key_E[e] = -1.0
                    num_absent += 1
            for e in chosen_K:
                self._key_E[e] = np.inf
                num_absent -= not self._is_resident_EA[e, a]
            least = self._find_least(num_dropped - num_absent) if num_dropped >= num_absent else 0.0
            for e in range(self._num_experts):
                self._is_resident_EA[e, a] = self._key_E[e] >= least

    def _find_least(self, rank: int) -> float:
        """Returns the key above which there are all but `rank` of those that are not negative."""
        num_kept = 0
        for e in range(self._num_experts):
            key = self._key_E[e]
            if key < 0.0 or (num_kept > rank and key >= self._lowest_E[rank]):
                continue
            i = min(num_kept, rank)
            while i > 0 and self._lowest_E[i - 1] > key:
                self._lowest_E[i] = self._lowest_E[i - 1]
                i -= 1
            self._lowest_E[i] = key
            num_kept += 1
        return self._lowest_E[rank]

    def _keep(self, key_EA: Scores) -> None:
        """Keeps the `num_slots` highest keys of each arm that are not negative."""
        num_dropped = len(key_EA) - self.num_slots
        if num_dropped <= 0:
            np.greater_equal(key_EA, 0.0, out=self._resident_EA)
            return
        ascending_EA = key_EA.copy()
        ascending_EA.partition(num_dropped, axis=0)
        least_A = np.maximum(ascending_EA[num_dropped], 0.0)
        np.greater_equal(key_EA, least_A, out=self._resident_EA)


class UseShares:
    """The share of steps that use each expert, as the arm that has hit most estimates it.

    Every arm of `ARMS` estimates the probability that a step uses the expert: the decayed share of
    past steps (LRU and LFU are the extremes), the mean of a fast, a middle and a slow one, and LFRU
    (arXiv 2608.07911), the share of all steps over the steps since the last use.

    A use is weighted by `decay ** (steps since)`. Its weight is 1 where a step has one token, else
    the expert's tokens over those of the busiest expert: a prefill requests almost all experts, and
    only their tokens tell them apart.

    In a few layers, each arm has a ghost cache, of ids only and as large as the layer's share of
    the cache, on the same routing. Following the arm with the fewest misses so far, recent steps
    counting most, is what keeps regret small: the misses beyond those of the best arm. Arms chosen
    by their realised hits are from LeCaR (Vietri et al., HotStorage 2018) and antirez/ds4 636,
    sampled layers that stand for the rest from set dueling (Qureshi et al., ISCA 2007).
    """

    def __init__(self, *, num_layers: int, num_experts: int):
        num_sampled = min(NUM_SAMPLED_LAYERS, num_layers)
        self.ghosts = {
            (2 * i + 1) * num_layers // (2 * num_sampled): LayerGhost(num_experts, len(ARMS))
            for i in range(num_sampled)
        }
        """The ghost caches of the sampled layers."""
        self.arm = 0
        """Place in `ARMS` of the one that is followed."""
        self._hits_A = np.zeros(len(ARMS))
        self._num_experts = num_experts
        self._decay_A = np.array(DECAYS)
        self._score_LEA = np.zeros((num_layers, num_experts, len(DECAYS)))
        self._view_LEA = self._score_LEA
        self._weight_A = np.ones(len(DECAYS))
        """The increment of a use in this step: it grows by 1 / decay per step, so that past uses
        need not be touched to decay."""
        self._total_A = np.zeros(len(DECAYS))
        """The score in this step of an expert that every step used, over the weight."""
        self._most_A = np.ones(len(DECAYS))
        """The score in this step of an expert that every step used."""
        self._last_step_LE = np.zeros((num_layers, num_experts))
        self._step = 0
        self._blended_arm = np.array([DECAYS.index(decay) for decay in BLENDED], dtype=np.int64)
        """Places in `DECAYS` of those in the arm `blend`."""
        self._blended_weight = np.array(list(BLENDED.values()))
        self._forever = DECAYS.index(1.0)

    @property
    def hits(self) -> float:
        """Hits of the best arm's ghost caches."""
        return float(self._hits_A.max())

    def divide(self, partitions: Sequence[tuple[int, range]]) -> None:
        """Gives the ghosts their layers' shares of the slots."""
        for num_slots, layers in partitions:
            for layer in self.ghosts.keys() & set(layers):
                self.ghosts[layer].num_slots = max(1, num_slots // len(layers))

    def begin_step(self) -> None:
        self._step += 1
        self._total_A = self._total_A * self._decay_A + 1.0
        self._weight_A /= self._decay_A
        if self._weight_A.max() > LARGEST_WEIGHT:
            self._score_LEA /= self._weight_A
            self._weight_A[:] = 1.0
        self._most_A = self._weight_A * np.maximum(self._total_A, 1.0)

    def on_routed(self, layer: int, tokens_per_expert: Mapping[int, int]) -> None:
        most, weight_A = max(tokens_per_expert.values(), default=1), self._weight_A
        for e, num_tokens in tokens_per_expert.items():
            share = num_tokens / most
            for a in range(len(weight_A)):
                self._view_LEA[layer, e, a] += share * weight_A[a]
            self._last_step_LE[layer, e] = self._step
        if layer in self.ghosts:
            share_EA = self.of_all_arms(layer)
            self._hits_A += self.ghosts[layer].serve(list(tokens_per_expert), share_EA)

    def end_step(self) -> None:
        best = int(self._hits_A.argmax())
        lead = self._hits_A[best] - self._hits_A[self.arm]
        if lead > SURE * self._hits_A[self.arm] ** 0.5:
            self.arm = best
        self._hits_A *= MEMORY

    def of_all_arms(self, layer: int) -> NDArray[np.float64]:
        """Returns `[E, A]`: the shares by every arm of a layer that this step has routed."""
        share_EA = np.empty((self._num_experts, len(ARMS)))
        view_EA = share_EA
        for arm in range(len(ARMS)):
            self.write_arm(layer, arm, view_EA[:, arm])
        return share_EA

    def write_layer(self, layer: int, share_E: Scores) -> None:
        """Writes the shares by the best arm of a layer that this step has routed."""
        self.write_arm(layer, self.arm, share_E)

    def write_arm(self, layer: int, arm: int, share_E: Scores) -> None:
        """Writes the shares by one arm, by its place in `ARMS`."""
        if arm >= 2:
            self._write_decayed(layer, arm - 2, share_E)
        elif COMPILED:
            self._write_each(layer, arm, share_E)
        elif arm == 1:
            age_E = (self._step - np.asarray(self._last_step_LE[layer])) + 1.0
            self._write_decayed(layer, self._forever, share_E)
            np.divide(share_E, age_E, out=share_E)
        else:
            # One after another, as `_write_each` does: a product of matrices may round otherwise.
            share_E[:], decayed_E = 0.0, np.empty(self._num_experts)
            for blended, weight in zip(self._blended_arm, self._blended_weight, strict=True):
                self._write_decayed(layer, blended, decayed_E)
                np.add(share_E, decayed_E * weight, out=share_E)

    def _write_each(self, layer: int, arm: int, share_E: Scores) -> None:
        """Does what `write_arm` does, expert by expert."""
        num_blended = len(self._blended_arm)
        for e in range(self._num_experts):
            if arm == 1:
                age = (self._step - self._last_step_LE[layer, e]) + 1.0
                a = self._forever
                share_E[e] = self._view_LEA[layer, e, a] / self._most_A[a] / age
                continue
            blend = 0.0
            for i in range(num_blended):
                a = self._blended_arm[i]
                blend += self._view_LEA[layer, e, a] / self._most_A[a] * self._blended_weight[i]
            share_E[e] = blend

    def write_decayed(self, layer: int, decay: float, share_E: Scores) -> None:
        """Writes the shares at one of `DECAYS` of a layer that this step has routed."""
        self._write_decayed(layer, DECAYS.index(decay), share_E)

    def _write_decayed(self, layer: int, a: int, share_E: Scores) -> None:
        most = self._most_A[a]
        if COMPILED:
            for e in range(self._num_experts):
                share_E[e] = self._view_LEA[layer, e, a] / most
        else:
            share_E[:] = self._score_LEA[layer, :, a] / most


class RegretEviction(EvictionPolicy):
    """Evicts the expert whose next use is expected latest, by the counts that have hit most.

    It needs neither training nor options: see `UseShares` for the counts that compete and for the
    choice. `reuse` eviction adds predictions to it.

    The score is `1 / (1 / share + d / L)`, for layers that are `d` layers ahead. That is the
    reciprocal of the expected time until the next use, in steps: an expert that every second step
    uses is worth less where its layer has just been computed than where it is next. Experts that
    were never used count as used once in a very long time, so that those of the farthest layer go
    first among them, too. Every score changes with every layer, so they are computed only where an
    expert is evicted.
    """

    def __init__(self, *, num_layers: int, num_experts: int):
        super().__init__(num_layers=num_layers, num_experts=num_experts)
        self._counts = UseShares(num_layers=num_layers, num_experts=num_experts)
        self._value_LE = np.zeros((num_layers, num_experts))
        """The share of steps that use each expert, as it was estimated last."""
        self._view_LE = self.score_LE
        layers_L = np.arange(num_layers)
        self._distance_LL = (layers_L - layers_L[:, None] - 1) % num_layers / num_layers
        """How far ahead each layer is, as a share of a step, when a layer has been routed; the last
        row: when a step begins."""
        self._is_outdated = False
        """The scores are those of an earlier layer or forecast."""
        self._layer_now = -1
        """The last layer whose router has run in this step."""

    @property
    def arm(self) -> str:
        """Name of the arm that is followed."""
        return ARMS[self._counts.arm]

    def divide(self, partitions: Sequence[tuple[int, range]]) -> None:
        super().divide(partitions)
        self._counts.divide(partitions)

    def begin_step(self, requests_T: Ints) -> None:  # noqa: ARG002
        self._counts.begin_step()
        self._layer_now = -1

    def on_routed(self, layer: int, tokens_per_expert: Mapping[int, int]) -> None:
        self._counts.on_routed(layer, tokens_per_expert)
        self._follow_routing(layer, tokens_per_expert)

    def _follow_routing(self, layer: int, tokens_per_expert: Mapping[int, int]) -> None:
        self._set_value(layer, tokens_per_expert)
        self._layer_now = layer
        self._is_outdated = True

    def _set_value(self, layer: int, tokens_per_expert: Mapping[int, int]) -> None:  # noqa: ARG002
        """Estimates the value of a layer's experts that has just been routed."""
        self._counts.write_layer(layer, self._value_LE[layer])

    def scores(self) -> Scores:
        """Returns the scores, computed anew if events have changed them."""
        if not self._is_outdated:
            return self.score_N
        self._is_outdated = False
        if not COMPILED:
            share_LE = np.maximum(self._value_LE, LEAST_SHARE)
            distance_L1 = self._distance_LL[self._layer_now][:, None]
            np.divide(share_LE, share_LE * distance_L1 + 1.0, out=self.score_LE)
            return self.score_N
        least = LEAST_SHARE
        for layer in range(self._num_layers):
            distance = self._distance_LL[self._layer_now, layer]
            for e in range(self._num_experts):
                share = max(self._value_LE[layer, e], least)
                self._view_LE[layer, e] = share / (share * distance + 1.0)
        return self.score_N

    def end_step(self) -> None:
        self._counts.end_step()
