"""The reuse predictor: the use of each expert over the coming tokens, for eviction.

Not from a paper. If the link is the bottleneck, earlier fetching cannot help, but keeping the right
experts can. The value of an expert is `(1 - gamma) / gamma * sum over t > 0 of gamma^t used(t)`, in
[0, 1]: its discounted use over the coming tokens. Belady's policy evicts by the next use; this is
an expectation of it.

Shape suffixes: T tokens, N those that are counted, D hidden size, L layers, E experts, K top_k, F
fading sums of an expert, U decays of the counts, P decays of the probabilities.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import numpy as np

from predictors.base import Floats, Forecast, Forecasts, Ints, Predictor, Signal, softmax
from predictors.errors import PredictorError
from predictors.learned import INPUT, OUTPUT, open_session
from predictors.spec import ModelSpec
from predictors.tensors import WEIGHTS, read_tensors, write_tensors

LONGEST_MEMORY = 64
"""Tokens at the end of a prompt that are counted one by one; earlier ones, decayed by half or more,
are left out."""

COUNT_DECAYS = (0.5, 0.8, 0.95, 0.99)
CHANCE_DECAYS = (0.8, 0.95)
"""Decay per token: over one or two tokens, a sentence, a paragraph."""

NUM_FADING = len(COUNT_DECAYS) + len(CHANCE_DECAYS)
DECAYS = np.array([*COUNT_DECAYS, *CHANCE_DECAYS], np.float32)


def network_path(layer: int) -> str:
    return f"predictors/reuse_{layer:02d}.onnx"


class ReusePredictor(Predictor):
    """Answers `routed` with one row: the value of the layer's experts after this step.

    It does not forecast the step itself: its scores are for eviction, not for prefetching.

    Args:
        graphs: a whole ONNX file for each layer: `hidden [T, D + F E]`, the gate input and the
            fading sums, to `scores [T, E]`.
        routers_LED, biases_LE: the model's own, for the probabilities of what was not chosen.
    """

    kind = "reuse"
    signals = frozenset({Signal.GATE_INPUT, Signal.ROUTED})

    def __init__(
        self, spec: ModelSpec, graphs: Mapping[int, bytes], routers_LED: Floats, biases_LE: Floats
    ):
        super().__init__(spec)
        if set(graphs) != set(range(spec.num_layers)):
            raise PredictorError(
                f"a reuse predictor of {spec.num_layers} layers needs networks for all of them; "
                f"got {sorted(graphs)}"
            )
        self._graphs = dict(graphs)
        self._sessions = {layer: open_session(graph) for layer, graph in graphs.items()}
        self._num_features = size = spec.hidden_size + NUM_FADING * spec.num_experts
        for layer, session in self._sessions.items():
            shapes = [session.get_inputs()[0].shape[1:], session.get_outputs()[0].shape[1:]]
            if shapes != [[size], [spec.num_experts]]:
                raise PredictorError(
                    f"the reuse network of layer {layer} has the shapes {shapes}; {spec.model_id} "
                    f"needs {[[size], [spec.num_experts]]}: it was made for another model"
                )
        self._routers_LED = np.ascontiguousarray(routers_LED, np.float32)
        self._biases_LE = np.ascontiguousarray(biases_LE, np.float32)
        self._fading_LFE = np.zeros((spec.num_layers, NUM_FADING, spec.num_experts), np.float32)
        self._hidden_ND = np.zeros((0, spec.hidden_size), np.float32)
        self._rows: Ints | slice = slice(0)
        self._is_alone = True

    def begin_step(self, tokens_T: Ints, requests_T: Ints) -> Forecasts:  # noqa: ARG002
        """Chooses the tokens to count: a request's last ones, or the last one of each request.

        Tokens of one request are consecutive.
        """
        is_last_T = np.append(requests_T[1:] != requests_T[:-1], True)
        self._is_alone = int(is_last_T.sum()) == 1
        self._rows = slice(-LONGEST_MEMORY, None) if self._is_alone else np.flatnonzero(is_last_T)
        return ()

    def gate_input(self, layer: int, hidden_TD: Floats) -> Forecasts:  # noqa: ARG002
        self._hidden_ND = np.array(hidden_TD[self._rows], np.float32)
        return ()

    def routed(self, layer: int, experts_TK: Ints, logits_TE: Floats | None) -> Forecasts:  # noqa: ARG002
        """Updates the decaying sums with the step's tokens and returns the values.

        With several requests, the values are means over the requests, as they share the cache.
        """
        experts_NK, hidden_ND = experts_TK[self._rows], self._hidden_ND
        chance_NE = softmax(hidden_ND @ self._routers_LED[layer].T + self._biases_LE[layer])
        fading_FE = self._fading_LFE[layer]
        if self._is_alone:
            for experts_K, chance_E in zip(experts_NK, chance_NE, strict=True):
                fade_token(fading_FE, experts_K, chance_E)
            hidden_ND = hidden_ND[-1:]
        else:
            used_NE = mark_used(experts_NK, self.spec.num_experts)
            fade(fading_FE, used_NE.mean(axis=0), chance_NE.mean(axis=0))
        features = np.empty((len(hidden_ND), self._num_features), np.float32)
        features[:, : self.spec.hidden_size] = hidden_ND
        features[:, self.spec.hidden_size :] = normalize_sums(fading_FE).ravel()
        (value_NE,) = self._sessions[layer].run([OUTPUT], {INPUT: features})
        if len(value_NE) > 1:
            value_NE = value_NE.mean(axis=0, keepdims=True)
        return [Forecast(layer, value_NE)]

    def files(self) -> dict[str, bytes]:
        graphs = {network_path(layer): graph for layer, graph in self._graphs.items()}
        return graphs | write_tensors({"routers": self._routers_LED, "biases": self._biases_LE})

    @classmethod
    def from_files(
        cls,
        spec: ModelSpec,
        files: Mapping[str, bytes],
        options: Mapping[str, Any],  # noqa: ARG003
    ) -> Self:
        graphs, arrays = read_layer_networks(spec, files, kind=cls.kind, path_of_layer=network_path)
        return cls(spec, graphs, arrays["routers"], arrays["biases"])


def read_layer_networks(
    spec: ModelSpec,
    files: Mapping[str, bytes],
    *,
    kind: str,
    path_of_layer: Callable[[int], str],
    others: Sequence[str] = (),
) -> tuple[dict[int, bytes], dict[str, Floats]]:
    """Returns the graph of each layer, and the arrays `routers [L, E, D]` and `biases [L, E]`.

    Raises PredictorError if a file is missing, `others` included, or an array has another shape.
    """
    paths = {layer: path_of_layer(layer) for layer in range(spec.num_layers)}
    missing = [path for path in [*others, *paths.values(), WEIGHTS] if path not in files]
    if missing:
        raise PredictorError(f"a {kind} predictor needs {', '.join(missing[:3])}")
    table = (spec.num_layers, spec.num_experts)
    shapes = {"routers": (*table, spec.hidden_size), "biases": table}
    graphs = {layer: files[path] for layer, path in paths.items()}
    return graphs, read_tensors(files, shapes, kind=kind)


def mark_used(experts_TK: Ints, num_experts: int) -> Floats:
    """Returns `[T, E]`: 1 where the token is routed to the expert; the id `num_experts` is none."""
    used_TE = np.zeros((len(experts_TK), num_experts + 1), np.float32)
    np.put_along_axis(used_TE, experts_TK, 1.0, axis=1)
    return used_TE[:, :num_experts]


def fade_token(state_FE: Floats, experts_K: Ints, chance_E: Floats) -> None:
    """Adds one token to a layer's sums in place: as `fade`, without marking what it does not use.

    The id `num_experts` is none.
    """
    state_FE *= DECAYS[:, None]
    num_experts = state_FE.shape[1]
    state_FE[: len(COUNT_DECAYS), [e for e in set(experts_K.tolist()) if e < num_experts]] += 1.0
    state_FE[len(COUNT_DECAYS) :] += chance_E


def fade(state: Floats, used_E: Floats, chance_E: Floats) -> None:
    """Adds a token to `state [..., U + P, E]` in place, for any leading axes."""
    state *= DECAYS[:, None]
    state[..., : len(COUNT_DECAYS), :] += used_E[..., None, :]
    state[..., len(COUNT_DECAYS) :, :] += chance_E[..., None, :]


def normalize_sums(state: Floats) -> Any:
    """Returns each decaying sum as a mean in [0, 1], the input of the networks."""
    return state * (1 - DECAYS[:, None])
