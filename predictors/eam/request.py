"""Forecasts from the iteration's EAM and an EAMC that is updated online.

MoE-Infinity (request level), sections 4 and 5.

Shape suffixes: T tokens, K top_k, R requests of the step, S request slots, C capacity, M matches,
L layers, E experts.
"""

import numpy as np

from predictors.base import Floats, Forecast, Forecasts, Ints
from predictors.eam.collection import (
    EamPredictor,
    activation_ratios,
    choice_probability,
    count_rows,
    find_nearest,
)
from predictors.errors import PredictorError
from predictors.metrics import Phase
from predictors.requests import IDLE_STEPS, expand_to_tokens, grow_rows
from predictors.spec import ModelSpec


class EamRequestPredictor(EamPredictor):
    """Forecasts later layers from stored EAMs that begin like this iteration's.

    Section 5.1 and figure 7: after each router, rows 0..l of the iteration's EAM are compared with
    the same rows of every stored one, both flattened (cosine, section 4.2). The cells of the
    `matches` most similar ones ("Several matched EAMs might be returned") are "summed up and
    normalized on each row"; that is the priority, to which the system's order `layer-decay` applies
    the proximity `1 - (i - l) / L`. Priorities are the mean over the requests of a step.

    When a request has ended, its EAM is stored; in a full collection it replaces the most similar
    one (section 4.2, figure 5).

    Args:
        capacity: the paper's models are served best from 120 on (section 7.5).
        matches: the paper gives no number of "several"; 8 is ours, a sixteenth of the collection.
    """

    kind = "eam-request"

    def __init__(
        self,
        spec: ModelSpec,
        counts_NLE: Floats,
        *,
        capacity: int = 128,
        matches: int = 8,
        learning: bool = True,
        idle_steps: int = IDLE_STEPS,
    ):
        super().__init__(
            spec, counts_NLE, capacity=capacity, learning=learning, idle_steps=idle_steps
        )
        if matches < 1:
            raise PredictorError(f"{self.kind} with matches={matches}: must be at least 1")
        self.matches = matches
        self._part_R = np.zeros(0, np.int64)
        self._product_RC = np.zeros((0, capacity), np.float32)
        self._square_R = np.zeros(0, np.float32)
        # "Traced for prefilling and decoding separately" (section 4.1).
        self._counts_SPLE = np.zeros((1, len(Phase), spec.num_layers, spec.num_experts), np.float32)

    def begin_step(self, tokens_T: Ints, requests_T: Ints) -> Forecasts:  # noqa: ARG002
        present = self._present = self._requests.begin_step(requests_T)
        self._counts_SPLE = grow_rows(self._counts_SPLE, self._requests.num_slots)
        self._counts_SPLE[present.new] = 0.0
        tokens_R = np.bincount(present.request_T, minlength=present.num_requests)
        self._part_R = np.where(tokens_R > 1, int(Phase.PREFILL), int(Phase.DECODE))
        self._product_RC = np.zeros((present.num_requests, self.collection.capacity), np.float32)
        self._square_R = np.zeros(present.num_requests, np.float32)
        return ()

    def routed(self, layer: int, experts_TK: Ints, logits_TE: Floats | None) -> Forecasts:  # noqa: ARG002
        present, collection = self._present, self.collection
        assert present is not None, "routed comes within a step"
        rows_RE = count_rows(
            experts_TK, present.request_T, present.num_requests, self.spec.num_experts
        )
        if present.num_requests == 1:
            self._counts_SPLE[present.slots_R[0], self._part_R[0], layer] += rows_RE[0]
        else:
            self._counts_SPLE[present.slots_R, self._part_R, layer] += rows_RE
        if not collection.size:
            return ()
        self._product_RC += rows_RE @ collection.flat_LEC[layer]
        self._square_R += np.einsum("re,re->r", rows_RE, rows_RE)
        if layer + 1 == self.spec.num_layers:
            return ()
        return self._forecasts(layer, find_nearest(self.similarity(layer), self.matches))

    def end_step(self) -> None:
        self._present = None
        for slot in self._requests.release_ended():
            if self.learning:
                for counts_LE in self._counts_SPLE[slot]:
                    if counts_LE.any():
                        self.store(counts_LE)

    def store(self, counts_LE: Floats) -> None:
        """Adds a request-level EAM, or replaces the most similar one (section 4.2)."""
        collection = self.collection
        full = collection.size == collection.capacity
        collection.put(collection.most_similar(counts_LE) if full else collection.size, counts_LE)

    def similarity(self, layer: int) -> Floats:
        """Returns `[R, size]`: cosines of rows 0..layer of the iteration and each stored matrix.

        Later rows are left out on both sides.
        """
        size = self.collection.size
        stored_C = self.collection.prefix_LC[layer, :size]
        length_RC = np.sqrt(self._square_R)[:, None] * stored_C
        return np.divide(self._product_RC[:, :size], np.maximum(length_RC, np.float32(1e-12)))

    def _forecasts(self, layer_now: int, matches_RM: Ints) -> Forecasts:
        present = self._present
        assert present is not None
        later = self.collection.counts_CLE[:, layer_now + 1 :]
        if present.num_requests == 1:
            shares_RLE = activation_ratios(np.add.reduce(later[matches_RM[0]], axis=0))[None]
            priority_LE = shares_RLE[0]
        else:
            shares_RLE = activation_ratios(later[matches_RM].sum(axis=1))
            priority_LE = shares_RLE.mean(axis=0)
        chance_RLE = choice_probability(shares_RLE, self.spec.top_k)
        return [
            Forecast(
                layer,
                expand_to_tokens(chance_RLE[:, offset], present),
                priority_E=priority_LE[offset],
            )
            for offset, layer in enumerate(range(layer_now + 1, self.spec.num_layers))
        ]
