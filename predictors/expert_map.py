"""Expert maps, found by semantic and by trajectory search (fMoE, section 4).

Shape suffixes: T tokens, K top_k, C capacity, L layers, E experts, D hidden size.
"""

import numpy as np
from numpy.typing import NDArray

from predictors.base import Floats, Forecast, Forecasts, Ints, Signal, softmax
from predictors.eam.collection import normalize_rows
from predictors.errors import PredictorError
from predictors.spec import ModelSpec
from predictors.stored import Shapes, StoredPredictor

DISTANCE = 3
"""Layers ahead that are forecast, unless the options name another number."""


class ExpertMapPredictor(StoredPredictor):
    """Forecasts the layer `distance` ahead from the most similar past iteration.

    Layers 0..d-1 are forecast by semantic search, which compares the model's inputs (equation 4);
    layer l+d, once layer l is routed, by trajectory search, which compares the router probabilities
    of layers 0..l (equation 5). The similarity determines the number of experts (section 4.3).
    After the step, its maps are added to the store (section 4.4).

    An iteration is one token, as in the authors' code, where each token of a prompt has a map. The
    semantic embedding is the token's normalised state before the first layer with experts. It
    differs from the paper's, the output of the embedding layer, by a scale that cosines ignore, and
    by the dense layers below, if there are any.

    Args:
        maps_NLE, embeddings_ND: stored iterations, at most `capacity`.
        distance: d, the paper's choice for three models (section 6.1).
        capacity: C; "e.g. 1K expert maps" (section 3.2).
        semantic: Search by semantics, too; without, the first `distance` layers have no forecast:
            "Map (T)" of the ablation (section 6.5).
        dynamic: Choose the number of experts by similarity; without, always `top_k`: "Map (T+S)".
        learning: Store the maps of each step.
    """

    kind = "expert-map"
    signals = frozenset({Signal.TOKENS, Signal.LAYER_INPUT, Signal.ROUTED, Signal.LOGITS})

    def __init__(
        self,
        spec: ModelSpec,
        maps_NLE: Floats,
        embeddings_ND: Floats,
        *,
        distance: int = DISTANCE,
        capacity: int = 1_000,
        semantic: bool = True,
        dynamic: bool = True,
        learning: bool = True,
    ):
        super().__init__(spec)
        if not 1 <= distance < spec.num_layers:
            raise PredictorError(
                f"{self.kind} with distance={distance}: the model has {spec.num_layers} layers "
                "with experts"
            )
        if len(maps_NLE) > capacity:
            raise PredictorError(
                f"{self.kind} with capacity={capacity} is too small for {len(maps_NLE)} maps"
            )
        self.distance = distance
        self.capacity = capacity
        self.semantic = semantic
        self.dynamic = dynamic
        self.learning = learning
        self.store = ExpertMapStore(capacity, spec.num_layers, spec.num_experts, spec.hidden_size)
        maps_LEN = np.moveaxis(maps_NLE, 0, 2).astype(np.float32)
        nothing_to_replace = np.zeros((0, 0), np.float32)
        self.store.add(maps_LEN, embeddings_ND.T.astype(np.float32), nothing_to_replace)
        self._begin(0)

    def _begin(self, num_tokens: int) -> None:
        spec = self.spec
        self._semantic_TC: Floats | None = None
        self._embeddings_TD: Floats | None = None
        self._product_TC = np.zeros((num_tokens, self.store.size), np.float32)
        self._square_T = np.zeros(num_tokens, np.float32)
        self._map_LTE = np.zeros((spec.num_layers, num_tokens, spec.num_experts), np.float32)
        self._layers_seen = 0

    def begin_step(self, tokens_T: Ints, requests_T: Ints) -> Forecasts:  # noqa: ARG002
        self._begin(len(tokens_T))
        return ()

    def layer_input(self, layer: int, hidden_TD: Floats) -> Forecasts:
        if layer > 0:
            return ()
        self._embeddings_TD = normalize_rows(hidden_TD.astype(np.float32))
        store = self.store
        self._semantic_TC = self._embeddings_TD @ store.embeddings_DC[:, : store.size]
        if not store.size or not self.semantic:
            return ()
        return self._forecasts(range(self.distance), self._semantic_TC)

    def routed(self, layer: int, experts_TK: Ints, logits_TE: Floats | None) -> Forecasts:  # noqa: ARG002
        assert logits_TE is not None, "logits are requested"
        probability_TE = softmax(logits_TE).astype(np.float32)
        self._map_LTE[layer] = probability_TE
        self._layers_seen += 1
        store = self.store
        if not store.size:
            return ()
        self._product_TC += probability_TE @ store.maps_LEC[layer, :, : store.size]
        self._square_T += np.einsum("te,te->t", probability_TE, probability_TE)
        target = layer + self.distance
        if target >= self.spec.num_layers:
            return ()
        return self._forecasts([target], self.similarity(layer))

    def similarity(self, layer: int) -> Floats:
        """Returns `[T, size]`: equation 5 over layers 0..layer."""
        stored_C = self.store.lengths_LC[layer][: self._product_TC.shape[1]]
        lengths_TC = np.sqrt(self._square_T)[:, None] * stored_C
        return self._product_TC / np.maximum(lengths_TC, 1e-12)

    def end_step(self) -> None:
        is_whole = self._layers_seen == self.spec.num_layers and self._embeddings_TD is not None
        if self.learning and is_whole:
            assert self._embeddings_TD is not None
            assert self._semantic_TC is not None
            scores_TC = redundancy_scores(
                self._semantic_TC,
                self.similarity(self.spec.num_layers - 1),
                distance=self.distance,
                num_layers=self.spec.num_layers,
            )
            self.store.add(np.moveaxis(self._map_LTE, 1, 2), self._embeddings_TD.T, scores_TC)
        self._begin(0)

    def _forecasts(self, layers: range | list[int], similarity_TC: Floats) -> Forecasts:
        top_k = self.spec.top_k
        best_T = similarity_TC.argmax(axis=1)
        delta_T = np.zeros(len(best_T), np.float32)  # constraint 8 alone: top_k experts
        if self.dynamic:
            delta_T = selection_threshold(similarity_TC[np.arange(len(best_T)), best_T])
        forecasts = []
        for layer in layers:
            probability_TE = self.store.maps_LEC[layer][:, best_T].T
            scores_TE = np.minimum(top_k * probability_TE, 1.0)
            wanted = np.flatnonzero(select_experts(probability_TE, delta_T, top_k).any(axis=0))
            expected = scores_TE[:, wanted].sum(axis=0)
            first = wanted[np.argsort(-expected, kind="stable")]
            forecasts.append(Forecast(layer, scores_TE, wanted=first.tolist()))
        return forecasts

    def arrays(self) -> dict[str, NDArray]:
        size = self.store.size
        maps_NLE = np.moveaxis(self.store.maps_LEC[:, :, :size], 2, 0)
        embeddings_ND = self.store.embeddings_DC[:, :size].T
        return {"maps": maps_NLE.astype(np.float16), "embeddings": embeddings_ND.astype(np.float16)}

    @classmethod
    def shapes(cls, spec: ModelSpec) -> Shapes:
        maps = (None, spec.num_layers, spec.num_experts)
        return {"maps": maps, "embeddings": (None, spec.hidden_size)}


def selection_threshold(score_T: Floats) -> Floats:
    """Returns `delta = clip(1 - score, 0, 1)`: more experts for less similarity (section 4.3)."""
    return np.clip(1.0 - score_T, 0.0, 1.0)


def select_experts(probability_TE: Floats, delta_T: Floats, top_k: int) -> NDArray[np.bool_]:
    """Returns `[T, E]`: the fewest likeliest experts with a total probability of delta.

    At least `top_k` are selected (section 4.3, equations 6 to 8).
    """
    order_TE = np.argsort(-probability_TE, axis=1, kind="stable")
    tokens_T1 = np.arange(len(order_TE))[:, None]
    summed_TE = np.cumsum(probability_TE[tokens_T1, order_TE], axis=1)
    needed_T = np.maximum((summed_TE < delta_T[:, None]).sum(axis=1) + 1, top_k)
    kept_TE = np.zeros(probability_TE.shape, np.bool_)
    kept_TE[tokens_T1, order_TE] = np.arange(probability_TE.shape[1]) < needed_T[:, None]
    return kept_TE


class ExpertMapStore:
    """Expert maps (each layer's router probabilities) and semantic embeddings of past iterations.

    Iterations are the last axis of the arrays, so that a search is one matrix product.
    """

    def __init__(self, capacity: int, num_layers: int, num_experts: int, hidden_size: int):
        self.capacity = capacity
        self.size = 0
        self.maps_LEC = np.zeros((num_layers, num_experts, capacity), np.float32)
        self.embeddings_DC = np.zeros((hidden_size, capacity), np.float32)
        """Each at length 1."""
        self.lengths_LC = np.zeros((num_layers, capacity), np.float32)
        """Length of layers 0..l of each flattened map: the divisor of equation 5."""

    def add(self, maps_LET: Floats, embeddings_DT: Floats, redundancy_TC: Floats) -> None:
        """Adds iterations; in a full store, each replaces the most redundant one (section 4.4).

        `redundancy_TC`, `[T, size]`, compares them with the stored maps.
        """
        num_new = maps_LET.shape[2]
        free = min(num_new, self.capacity - self.size)
        self._write(np.arange(self.size, self.size + free), slice(0, free), maps_LET, embeddings_DT)
        old, self.size = self.size, self.size + free
        if free == num_new or not old:
            # Of more than the capacity, with nothing to compare with, the first ones are stored.
            return
        # Of several that replace the same one, the last is stored.
        replaced = redundancy_TC[free:].argmax(axis=1)
        positions, last = np.unique(replaced[::-1], return_index=True)
        self._write(positions, num_new - 1 - last, maps_LET, embeddings_DT)

    def _write(
        self, positions: Ints, new: Ints | slice, maps_LET: Floats, embeddings_DT: Floats
    ) -> None:
        maps = maps_LET[:, :, new]
        self.maps_LEC[:, :, positions] = maps
        self.embeddings_DC[:, positions] = normalize_rows(embeddings_DT[:, new].T).T
        self.lengths_LC[:, positions] = np.sqrt(np.cumsum(np.square(maps).sum(axis=1), axis=0))


def redundancy_scores(
    semantic_TC: Floats, trajectory_TC: Floats, *, distance: int, num_layers: int
) -> Floats:
    """Returns `RDY = d/L score_sem + (L - d)/L score_map` (fMoE, section 4.4).

    Each score is weighted by the share of layers that it forecasts.
    """
    share = distance / num_layers
    return share * semantic_TC + (1.0 - share) * trajectory_TC
