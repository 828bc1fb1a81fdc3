"""Expert maps, found by semantic and by trajectory search (fMoE, section 4).

Shape suffixes: T tokens, K top_k, C capacity, L layers, E experts, D hidden size.
"""

from collections.abc import Mapping
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from predictors.base import Floats, Forecast, Forecasts, Ints, Predictor, Signal, check_options
from predictors.eam.matrix import normalize_rows
from predictors.errors import PredictorError
from predictors.expert_map.store import ExpertMapStore, redundancy_scores
from predictors.spec import ModelSpec
from predictors.tensors import read_tensors, write_tensors


class ExpertMapPredictor(Predictor):
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
        maps_NLE, embeddings_ND: stored iterations, at most `capacity`; None is a cold start.
        distance: d, the paper's choice for three models (section 6.1).
        capacity: C; "e.g. 1K expert maps" (section 3.2).
    """

    kind = "expert-map"
    signals = frozenset({Signal.TOKENS, Signal.LAYER_INPUT, Signal.ROUTED, Signal.LOGITS})

    def __init__(
        self,
        spec: ModelSpec,
        maps_NLE: Floats | None = None,
        embeddings_ND: Floats | None = None,
        *,
        distance: int = 3,
        capacity: int = 1_000,
        learning: bool = True,
    ):
        super().__init__(spec)
        if not 1 <= distance < spec.num_layers:
            raise PredictorError(
                f"{self.kind} with distance={distance}: the model has {spec.num_layers} layers "
                "with experts"
            )
        self.distance = distance
        self.learning = learning
        self.store = ExpertMapStore(capacity, spec.num_layers, spec.num_experts, spec.hidden_size)
        if maps_NLE is not None and embeddings_ND is not None:
            if len(maps_NLE) > capacity:
                raise PredictorError(
                    f"{self.kind} with capacity={capacity} is too small for {len(maps_NLE)} maps"
                )
            maps_LEN = np.moveaxis(maps_NLE, 0, 2).astype(np.float32)
            nothing_to_replace = np.zeros((0, 0), np.float32)
            self.store.add(maps_LEN, embeddings_ND.T.astype(np.float32), nothing_to_replace)
        self._begin(0)

    @classmethod
    def empty(cls, spec: ModelSpec, **options: Any) -> Self:
        """Makes a predictor with an empty store: a cold start."""
        return cls(spec, **options)

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
        if not store.size:
            return ()
        return self._forecasts(range(self.distance), self._semantic_TC)

    def routed(self, layer: int, experts_TK: Ints, logits_TE: Floats | None) -> Forecasts:  # noqa: ARG002
        assert logits_TE is not None, "logits are requested"
        probability_TE = softmax(logits_TE)
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
        lengths_TC = np.sqrt(self._square_T)[:, None] * self.store.lengths_LC[layer][: self._width]
        return self._product_TC / np.maximum(lengths_TC, 1e-12)

    @property
    def _width(self) -> int:
        return self._product_TC.shape[1]

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

    # ---- storing

    def files(self) -> dict[str, bytes]:
        size = self.store.size
        maps_NLE = np.moveaxis(self.store.maps_LEC[:, :, :size], 2, 0)
        embeddings_ND = self.store.embeddings_DC[:, :size].T
        return write_tensors(
            {"maps": maps_NLE.astype(np.float16), "embeddings": embeddings_ND.astype(np.float16)}
        )

    def options(self) -> dict[str, Any]:
        return {
            "distance": self.distance,
            "capacity": self.store.capacity,
            "learning": self.learning,
        }

    @classmethod
    def from_files(
        cls, spec: ModelSpec, files: Mapping[str, bytes], options: Mapping[str, Any]
    ) -> Self:
        shapes = {
            "maps": (None, spec.num_layers, spec.num_experts),
            "embeddings": (None, spec.hidden_size),
        }
        arrays = read_tensors(files, shapes, kind=cls.kind)
        return cls(spec, arrays["maps"], arrays["embeddings"], **check_options(cls, options))


def softmax(logits_TE: Floats) -> Floats:
    """Returns the router's probability distribution over the experts (section 4.1)."""
    shifted_TE = np.exp(logits_TE - logits_TE.max(axis=1, keepdims=True))
    return (shifted_TE / shifted_TE.sum(axis=1, keepdims=True)).astype(np.float32)


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
