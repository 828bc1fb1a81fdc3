"""Forecasts from the EAM of the sequence so far and a clustered EAMC.

MoE-Infinity (sequence level), sections 4 and 5.

Shape suffixes: T tokens, K top_k, R requests of the step, S request slots, C capacity, L layers,
E experts, N sequences.
"""

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray

from predictors.base import Floats, Forecast, Forecasts, Ints
from predictors.eam.collection import (
    EamCollection,
    EamPredictor,
    attainable_accuracy,
    choose_representatives,
    count_rows,
    normalize_rows,
)
from predictors.errors import PredictorError
from predictors.requests import IDLE_STEPS, expand_to_tokens, grow_rows
from predictors.spec import ModelSpec
from predictors.stored import Shapes

EPSILON = 1e-4
"""Added to the ratios, so that unseen experts are ordered by layer too (algorithm 1, step 26); less
than the ratio of one token in ten thousand."""

DATASET_SIZE = 512
"""Sequences that a reconstruction clusters, the latest ones: four times the default capacity. The
clustering takes a few tenths of a second."""

REBUILD_STEPS = 256
"""Steps from the start of a reconstruction to its use, the length of some ten answers: the paper
waits for "approximately 10-13 input sequences" (section 8.5). The number is fixed, so that a replay
gives the same forecasts every time."""

DATASET = "dataset"
"""Name of the array of sequences in the predictor's file."""


class EamSequencePredictor(EamPredictor):
    """Forecasts later layers from the stored EAM nearest to the current one.

    Algorithm 1 and section 5.2: after each router, the current EAM (all tokens of the sequence so
    far) is compared with every stored one by equation 1. The nearest one's activation ratios are
    the forecast of all later layers; priority is `ratio + EPSILON`, to which the system's order
    `layer-decay` applies `1 - (i - l) / L`. Beyond the paper, a running sequence is also forecast
    before its next step, which covers layer 0. Priorities are the mean over the sequences of a
    step.

    Drift (section 4.3): sequences with bad forecasts are recorded and added "to the dataset used
    for reconstructing the EAMC"; when there are enough of them, a thread clusters the data set
    again, and forecasts come from the new collection `REBUILD_STEPS` later. Until the collection is
    full, every sequence that ends is stored.

    Args:
        dataset_NLE: the sequences that the collection was made of, or some of them; None: the
            collection's own.
        insufficient: a sequence is recorded if the accuracy of its forecasts is below this share
            of that of the sequence's EAM (`attainable_accuracy`): a new distribution may be easier
            and still be forecast badly.
        rebuild_after: number of recorded sequences that trigger the clustering; the paper adapts
            after 10-13 (section 4.3).
    """

    kind = "eam-sequence"
    optional = frozenset({DATASET})

    def __init__(
        self,
        spec: ModelSpec,
        counts_NLE: Floats,
        dataset_NLE: NDArray | None = None,
        *,
        capacity: int = 128,
        insufficient: float = 0.0,
        rebuild_after: int = 13,
        learning: bool = True,
        idle_steps: int = IDLE_STEPS,
        seed: int = 0,
    ):
        super().__init__(
            spec, counts_NLE, capacity=capacity, learning=learning, idle_steps=idle_steps
        )
        if rebuild_after < 1:
            raise PredictorError(f"{self.kind} with rebuild_after={rebuild_after}: at least 1")
        self.insufficient = insufficient
        self.rebuild_after = rebuild_after
        self.seed = seed
        self._random = np.random.default_rng(seed)
        self._poor: list[Floats] = []
        dataset_NLE = counts_NLE if dataset_NLE is None else dataset_NLE
        self._dataset_NLE = shrink_counts(dataset_NLE)[-DATASET_SIZE:]
        self._rebuilt: Future[EamCollection] | None = None
        """The collection that is being made."""
        self._steps_left = 0
        """Steps until it is used."""
        self._counts_SLE = np.zeros((1, spec.num_layers, spec.num_experts), np.float32)
        self._cosines_SLC = np.zeros((1, spec.num_layers, capacity), np.float32)
        self._similarity_SC = np.zeros((1, capacity), np.float32)
        self._best_S = np.zeros(1, np.int64)
        self._tally_S2 = np.zeros((1, 2))
        """Number of choices that were forecast, and of all choices."""
        self._rank()

    def begin_step(self, tokens_T: Ints, requests_T: Ints) -> Forecasts:  # noqa: ARG002
        present = self._present = self._requests.begin_step(requests_T)
        if self._requests.num_slots > len(self._best_S):
            self._grow(self._requests.num_slots)
        for slot in present.new:
            self._counts_SLE[slot] = 0.0
            self._cosines_SLC[slot] = 0.0
            self._similarity_SC[slot] = 0.0
            self._best_S[slot] = -1
            self._tally_S2[slot] = 0.0
        if len(present.new) == present.num_requests:
            return ()
        # Summed again, so that the rounding errors of many updates do not accumulate.
        self._similarity_SC[present.slots_R] = self._cosines_SLC[present.slots_R].sum(axis=1)
        return self._forecasts(-1)

    def routed(self, layer: int, experts_TK: Ints, logits_TE: Floats | None) -> Forecasts:  # noqa: ARG002
        present = self._present
        assert present is not None, "routed comes within a step"
        slots_R = present.rows
        rows_RE = count_rows(
            experts_TK, present.request_T, present.num_requests, self.spec.num_experts
        )
        self._tally(layer, experts_TK, rows_RE.sum(axis=1))
        rows_RE += self._counts_SLE[slots_R, layer]
        self._counts_SLE[slots_R, layer] = rows_RE
        cosines_RC = normalize_rows(rows_RE) @ self.collection.units_LEC[layer]
        self._similarity_SC[slots_R] += cosines_RC - self._cosines_SLC[slots_R, layer]
        self._cosines_SLC[slots_R, layer] = cosines_RC
        return self._forecasts(layer)

    def end_step(self) -> None:
        self._present = None
        for slot in self._requests.release_ended():
            if self.learning:
                self._learn(self._counts_SLE[slot].copy(), *self._tally_S2[slot])
        if self._rebuilt is not None:
            self._steps_left -= 1
            if self._steps_left == 0:
                self._use_rebuilt(self._rebuilt.result())
        elif len(self._poor) >= self.rebuild_after:
            self._start_rebuild()

    def _learn(self, counts_LE: Floats, forecast: float, made: float) -> None:
        """Stores or records a sequence that has ended, by the number of forecast choices."""
        if self.collection.size < self.collection.capacity:
            self.collection.put(self.collection.size, counts_LE)
            self._add_to_dataset([counts_LE])
            self._update_similarities()
        elif forecast < self.insufficient * made * float(
            attainable_accuracy(counts_LE, self.spec.top_k)
        ):
            self._poor.append(counts_LE)

    def _add_to_dataset(self, matrices: Sequence[Floats]) -> None:
        """Adds sequences; the earliest ones leave."""
        added = shrink_counts(np.stack(matrices))
        self._dataset_NLE = np.concatenate([self._dataset_NLE, added])[-DATASET_SIZE:]

    def _start_rebuild(self) -> None:
        """Clusters the data set and the recorded sequences in a thread (section 4.3)."""
        self._add_to_dataset(self._poor)
        self._poor.clear()
        self._steps_left = REBUILD_STEPS
        executor = ThreadPoolExecutor(1, thread_name_prefix="eam-sequence")
        self._rebuilt = executor.submit(self._make_collection, self._dataset_NLE)
        executor.shutdown(wait=False)

    def _make_collection(self, dataset_NLE: NDArray) -> EamCollection:
        """Returns a new collection of the data set's representatives."""
        matrices_NLE = dataset_NLE.astype(np.float32)
        kept = choose_representatives(matrices_NLE, self.capacity, self._random)
        spec = self.spec
        collection = EamCollection(
            self.capacity, spec.num_layers, spec.num_experts, top_k=spec.top_k
        )
        collection.fill(matrices_NLE[kept])
        return collection

    def _use_rebuilt(self, collection: EamCollection) -> None:
        self._rebuilt, self.collection = None, collection
        self._update_similarities()

    def arrays(self) -> dict[str, NDArray]:
        return {**super().arrays(), DATASET: self._dataset_NLE}

    @classmethod
    def shapes(cls, spec: ModelSpec) -> Shapes:
        shapes = super().shapes(spec)
        return {**shapes, DATASET: shapes["matrices"]}

    def _update_similarities(self) -> None:
        """Compares the running sequences with the changed collection."""
        units_SLE = normalize_rows(self._counts_SLE)
        self._cosines_SLC = np.einsum("sle,lec->slc", units_SLE, self.collection.units_LEC)
        self._similarity_SC = self._cosines_SLC.sum(axis=1)
        self._best_S[:] = -1
        self._rank()

    def similarity(self, request_slot: int) -> Floats:
        """Returns `[size]`: 1 - equation 1 of a running sequence and every stored matrix."""
        used_C = self._similarity_SC[request_slot, : self.collection.size]
        return used_C / np.float32(self.spec.num_layers)

    # ---- forecasts

    def _forecasts(self, layer_now: int) -> Forecasts:
        present, collection = self._present, self.collection
        if present is None or not collection.size:
            return ()
        used_RC = self._similarity_SC[present.rows, : collection.size]
        best_R = used_RC.argmax(axis=1)
        self._best_S[present.slots_R] = best_R
        later = slice(layer_now + 1, self.spec.num_layers)
        if len(best_R) == 1:
            scores_LRE = collection.chance_CLE[best_R[0], later, None]
            ratio_LE = self._ratio_CLE[best_R[0], later]
        else:
            scores_LRE = collection.chance_CLE[best_R, later].swapaxes(0, 1)
            ratio_LE = self._ratio_CLE[best_R, later].mean(axis=0)
        return [
            Forecast(layer, expand_to_tokens(scores_RE, present), priority_E=priority_E)
            for layer, (scores_RE, priority_E) in enumerate(
                zip(scores_LRE, ratio_LE, strict=True), start=later.start
            )
        ]

    # ---- accuracy

    def _tally(self, layer: int, experts_TK: Ints, made_R: Floats) -> None:
        """Counts the choices that were among the top_k of the last forecast, if there was one.

        `made_R`: choices of each request, without those of none.
        """
        present = self._present
        assert present is not None
        best_R = self._best_S[present.slots_R]
        if present.num_requests == 1:
            slot, best = int(present.slots_R[0]), int(best_R[0])
            if best >= 0:
                hits = np.count_nonzero(self._is_top_CLE[best, layer][experts_TK])
                self._tally_S2[slot] += (hits, made_R[0])
            return
        hits_TK = self._is_top_CLE[best_R[present.request_T][:, None], layer, experts_TK]
        hits_R = np.bincount(present.request_T, hits_TK.sum(axis=1), present.num_requests)
        was_forecast_R = best_R >= 0
        self._tally_S2[present.slots_R, 0] += hits_R * was_forecast_R
        self._tally_S2[present.slots_R, 1] += made_R * was_forecast_R

    def _rank(self) -> None:
        """Derives tables from the stored matrices after each change."""
        chance_CLE = self.collection.chance_CLE
        self._ratio_CLE = self.collection.shares_CLE + np.float32(EPSILON)
        best = np.argsort(-chance_CLE, axis=2, kind="stable")[:, :, : self.spec.top_k]
        # The id after the last stands for no choice: never a hit.
        self._is_top_CLE = np.zeros((*chance_CLE.shape[:2], chance_CLE.shape[2] + 1), np.bool_)
        np.put_along_axis(self._is_top_CLE, best, True, axis=2)

    def _grow(self, num_slots: int) -> None:
        self._counts_SLE = grow_rows(self._counts_SLE, num_slots)
        self._cosines_SLC = grow_rows(self._cosines_SLC, num_slots)
        self._similarity_SC = grow_rows(self._similarity_SC, num_slots)
        self._best_S = grow_rows(self._best_S, num_slots)
        self._tally_S2 = grow_rows(self._tally_S2, num_slots)


def shrink_counts(counts_NLE: NDArray) -> NDArray[np.uint16]:
    """Returns the counts of tokens in two bytes each; larger ones become the largest."""
    return np.minimum(counts_NLE, np.iinfo(np.uint16).max).astype(np.uint16)
