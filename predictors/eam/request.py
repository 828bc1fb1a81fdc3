"""Forecasts from the iteration's EAM and an EAMC that is updated online.

MoE-Infinity (request level), sections 4 and 5.

Shape suffixes: T tokens, K top_k, R requests of the step, S request slots, C capacity, M matches,
L layers, E experts.
"""

from collections.abc import Mapping
from enum import IntEnum
from typing import Any, Self

import numpy as np

from predictors.base import Floats, Forecast, Forecasts, Ints, Predictor, Signal, check_options
from predictors.eam.collection import EamCollection, find_nearest
from predictors.eam.matrix import activation_ratios, choice_probability, count_rows, layer_decays
from predictors.errors import PredictorError
from predictors.requests import IDLE_STEPS, LiveRequests, StepRequests, expand_to_tokens, grow_rows
from predictors.spec import ModelSpec
from predictors.tensors import read_tensors, write_tensors


class EamPhase(IntEnum):
    """Request-level EAMs are "traced for prefilling and decoding separately" (section 4.1)."""

    PREFILL = 0
    DECODE = 1


class EamRequestPredictor(Predictor):
    """Forecasts later layers from stored EAMs that begin like this iteration's.

    Section 5.1 and figure 7: after each router, rows 0..l of the iteration's EAM are compared with
    the same rows of every stored one, both flattened (cosine, section 4.2). The cells of the
    `matches` most similar ones ("Several matched EAMs might be returned") are "summed up and
    normalized on each row"; priority is that times the proximity `1 - (i - l) / L`. Priorities are
    the mean over the requests of a step.

    When a request has ended, its EAM is stored; in a full collection it replaces the most similar
    one (section 4.2, figure 5).

    Args:
        counts_NLE: stored matrices, at most `capacity`; none is a cold start.
        capacity: the paper's models are served best from 120 on (section 7.5).
    """

    kind = "eam-request"
    signals = frozenset({Signal.TOKENS, Signal.ROUTED})

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
        super().__init__(spec)
        if matches < 1:
            raise PredictorError(f"{self.kind} with matches={matches}: must be at least 1")
        self.collection = EamCollection.from_matrices(
            counts_NLE, spec, capacity=capacity, kind=self.kind
        )
        self.matches = matches
        self.learning = learning
        self._decays_L1 = layer_decays(spec.num_layers)[:, None]
        self._requests = LiveRequests(idle_steps=idle_steps)
        self._present: StepRequests | None = None
        self._part_R = np.zeros(0, np.int64)
        self._product_RC = np.zeros((0, capacity), np.float32)
        self._square_R = np.zeros(0, np.float32)
        self._counts_SPLE = np.zeros(
            (1, len(EamPhase), spec.num_layers, spec.num_experts), np.float32
        )

    @classmethod
    def empty(cls, spec: ModelSpec, **options: Any) -> Self:
        """Makes a predictor with an empty collection: a cold start."""
        return cls(spec, np.zeros((0, spec.num_layers, spec.num_experts), np.float32), **options)

    def begin_step(self, tokens_T: Ints, requests_T: Ints) -> Forecasts:  # noqa: ARG002
        present = self._present = self._requests.begin_step(requests_T)
        self._counts_SPLE = grow_rows(self._counts_SPLE, self._requests.num_slots)
        self._counts_SPLE[present.new] = 0.0
        tokens_R = np.bincount(present.request_T, minlength=present.num_requests)
        self._part_R = np.where(tokens_R > 1, int(EamPhase.PREFILL), int(EamPhase.DECODE))
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
        priority_LE = priority_LE * self._decays_L1[: len(priority_LE)]
        return [
            Forecast(
                layer,
                expand_to_tokens(chance_RLE[:, offset], present),
                priority_E=priority_LE[offset],
            )
            for offset, layer in enumerate(range(layer_now + 1, self.spec.num_layers))
        ]

    # ---- storing

    def files(self) -> dict[str, bytes]:
        return write_tensors({"matrices": self.collection.counts.astype(np.uint32)})

    def options(self) -> dict[str, Any]:
        return {
            "capacity": self.collection.capacity,
            "matches": self.matches,
            "learning": self.learning,
        }

    @classmethod
    def from_files(
        cls, spec: ModelSpec, files: Mapping[str, bytes], options: Mapping[str, Any]
    ) -> Self:
        shape = (None, spec.num_layers, spec.num_experts)
        arrays = read_tensors(files, {"matrices": shape}, kind=cls.kind)
        return cls(spec, arrays["matrices"], **check_options(cls, options))
