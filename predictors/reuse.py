"""The reuse predictor: the use of each expert over the coming tokens, for eviction.

Not from a paper. If the link is the bottleneck, earlier fetching cannot help, but keeping the right
experts can. The value of an expert is `(1 - gamma) / gamma * sum over t > 0 of gamma^t used(t)`, in
[0, 1]: its discounted use over the coming tokens. Belady's policy evicts by the next use; this is
an expectation of it.

Shape suffixes: T tokens, N those that are counted, D hidden size, L layers, E experts, K top_k, F
fading sums of an expert, X = F E.
"""

from collections.abc import Mapping
from typing import Any, Self

import numpy as np

from predictors.base import Floats, Forecast, Forecasts, Ints, Predictor, Signal
from predictors.errors import PredictorError
from predictors.fading import NUM_FADING, FadingSums
from predictors.learned import INPUT, OUTPUT
from predictors.networks.network import list_row_shapes, open_network
from predictors.spec import ModelSpec
from predictors.tensors import WEIGHTS, read_tensors, write_tensors

LONGEST_MEMORY = 64
"""Tokens at the end of a prompt that are counted one by one; earlier ones, decayed by half or more,
are left out."""


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
        self._networks = {layer: open_network(graph) for layer, graph in graphs.items()}
        size = spec.hidden_size + NUM_FADING * spec.num_experts
        for layer, network in self._networks.items():
            shapes = list_row_shapes(network)
            if shapes != [[size], [spec.num_experts]]:
                raise PredictorError(
                    f"the reuse network of layer {layer} has the shapes {shapes}; {spec.model_id} "
                    f"needs {[[size], [spec.num_experts]]}: it was made for another model"
                )
        self._fading = FadingSums(routers_LED, biases_LE)
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
        means_FE = self._fading.add(layer, experts_NK, hidden_ND, is_one_request=self._is_alone)
        if self._is_alone:
            hidden_ND = hidden_ND[-1:]
        means_NX = means_FE.reshape(1, -1).repeat(len(hidden_ND), axis=0)
        (value_NE,) = self._networks[layer].run([OUTPUT], {INPUT: (hidden_ND, means_NX)})
        if len(value_NE) > 1:
            value_NE = value_NE.mean(axis=0, keepdims=True)
        return [Forecast(layer, value_NE)]

    def files(self) -> dict[str, bytes]:
        graphs = {network_path(layer): graph for layer, graph in self._graphs.items()}
        return graphs | write_tensors(self._fading.tensors())

    @classmethod
    def from_files(
        cls,
        spec: ModelSpec,
        files: Mapping[str, bytes],
        options: Mapping[str, Any],  # noqa: ARG003
    ) -> Self:
        paths = {layer: network_path(layer) for layer in range(spec.num_layers)}
        missing = [path for path in [*paths.values(), WEIGHTS] if path not in files]
        if missing:
            raise PredictorError(f"a {cls.kind} predictor needs {', '.join(missing[:3])}")
        table = (spec.num_layers, spec.num_experts)
        shapes = {"routers": (*table, spec.hidden_size), "biases": table}
        arrays = read_tensors(files, shapes, kind=cls.kind)
        graphs = {layer: files[path] for layer, path in paths.items()}
        return cls(spec, graphs, arrays["routers"], arrays["biases"])
