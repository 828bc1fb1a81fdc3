"""The next-use predictor: when each expert is used again, for eviction.

Not from a paper. Belady's policy evicts what is used again latest. For each expert, this forecasts
the probability of a use within the next 1, 2, 4, 8 and 16 tokens, from the router's input, fading
counts of past routing, the last layer's states of the request's earlier tokens (what the model
expects to come next, and what the text is about), and the routing behind the same text before.

Shape suffixes: T tokens, N those that are counted, D hidden size, L layers, E experts, K top_k, F
fading sums of an expert, C decays of the context, S slots of requests, H horizons, X features of a
layer, Y numbers of the context's summary.
"""

from collections.abc import Mapping
from typing import Any, Self

import numpy as np

from predictors.base import (
    HORIZONS,
    Floats,
    Forecast,
    Forecasts,
    Ints,
    Predictor,
    Signal,
)
from predictors.errors import PredictorError
from predictors.fading import NUM_FADING, FadingSums
from predictors.learned import INPUT, OUTPUT
from predictors.networks.network import list_row_shapes, open_network
from predictors.requests import LiveRequests, StepRequests, grow_rows
from predictors.reuse import LONGEST_MEMORY, read_layer_networks
from predictors.routing_history import MATCHED, RoutingHistory, flag_match
from predictors.spec import ModelSpec
from predictors.tensors import write_tensors

CONTEXT_DECAYS = (0.0, 0.5, 0.8, 0.95)
"""Decays per token of the means over the last layer's earlier states; 0 is the token before."""

CONTEXT = "predictors/next_use_context.onnx"


def network_path(layer: int) -> str:
    return f"predictors/next_use_{layer:02d}.onnx"


def num_features(spec: ModelSpec) -> int:
    """Returns the features of a layer's network without the summary of the context."""
    return spec.hidden_size + (NUM_FADING + 1) * spec.num_experts + len(MATCHED)


class NextUsePredictor(Predictor):
    """Answers `routed` with a row for each of `HORIZONS`: probabilities of a use within it.

    It does not forecast the step itself: its scores are for eviction, not for prefetching. The
    states are those of the token before, as the present one has yet to reach the last layer. What
    followed the same text before is only looked up while a single request runs.

    Args:
        context_graph: ONNX file: `hidden [N, C D]`, the means of `CONTEXT_DECAYS`, to
            `scores [N, Y]`.
        graphs: an ONNX file for each layer: `hidden [N, X + Y]` to `scores [N, H E]`.
        routers_LED, biases_LE: the model's own, for the probabilities of what was not chosen.
    """

    kind = "next-use"
    signals = frozenset({Signal.TOKENS, Signal.GATE_INPUT, Signal.ROUTED})

    def __init__(
        self,
        spec: ModelSpec,
        context_graph: bytes,
        graphs: Mapping[int, bytes],
        routers_LED: Floats,
        biases_LE: Floats,
    ):
        super().__init__(spec)
        if set(graphs) != set(range(spec.num_layers)):
            raise PredictorError(
                f"a next-use predictor of {spec.num_layers} layers needs networks for all of them; "
                f"got {sorted(graphs)}"
            )
        self._context_graph, self._graphs = context_graph, dict(graphs)
        self._context_network = open_network(context_graph)
        self._networks = {layer: open_network(graph) for layer, graph in graphs.items()}
        self._summary_size = self._check_shapes()
        self._fading = FadingSums(routers_LED, biases_LE)
        self._history = RoutingHistory(spec)
        self._live = LiveRequests()
        self._context_SCD = np.zeros((0, len(CONTEXT_DECAYS), spec.hidden_size), np.float32)
        self._present: StepRequests | None = None
        self._summary_NY = np.zeros((0, self._summary_size), np.float32)
        self._hidden_ND = np.zeros((0, spec.hidden_size), np.float32)
        self._rows: Ints | slice = slice(0)
        self._is_alone = True

    def _check_shapes(self) -> int:
        """Returns the numbers of the summary; PredictorError if a graph is not of this model."""
        spec = self.spec
        context = list_row_shapes(self._context_network)
        summary = context[1][0]
        wanted = [[num_features(spec) + summary], [len(HORIZONS) * spec.num_experts]]
        layer_shapes = {layer: list_row_shapes(net) for layer, net in self._networks.items()}
        if context[0] != [len(CONTEXT_DECAYS) * spec.hidden_size] or any(
            shapes != wanted for shapes in layer_shapes.values()
        ):
            raise PredictorError(
                f"the next-use networks have the shapes {context} and {layer_shapes}; "
                f"{spec.model_id} needs {wanted} in every layer: they were made for another model"
            )
        return int(summary)

    def begin_step(self, tokens_T: Ints, requests_T: Ints) -> Forecasts:
        """Chooses the tokens to count: a request's last ones, or the last one of each request.

        Tokens of one request are consecutive.
        """
        present = self._present = self._live.begin_step(requests_T)
        self._context_SCD = grow_rows(self._context_SCD, self._live.num_slots)
        self._context_SCD[present.new] = 0.0
        self._is_alone = present.num_requests == 1
        if self._is_alone:
            self._rows = slice(-LONGEST_MEMORY, None)
            self._history.append(tokens_T)
        else:
            is_last_T = np.append(requests_T[1:] != requests_T[:-1], True)
            self._rows = np.flatnonzero(is_last_T)
        slots_N = present.slots_R[present.request_T[self._rows]]
        if self._is_alone:
            slots_N = slots_N[-1:]
        context_NX = self._context_SCD[slots_N].reshape(len(slots_N), -1)
        (self._summary_NY,) = self._context_network.run([OUTPUT], {INPUT: context_NX})
        return ()

    def gate_input(self, layer: int, hidden_TD: Floats) -> Forecasts:
        self._hidden_ND = np.array(hidden_TD[self._rows], np.float32)
        if layer == self.spec.num_layers - 1:
            self._update_contexts(np.asarray(hidden_TD, np.float32))
        return ()

    def _update_contexts(self, hidden_TD: Floats) -> None:
        present = self._present
        assert present is not None
        for request, slot in enumerate(present.slots_R.tolist()):
            is_own_T = present.request_T == request
            own_TD = hidden_TD if self._is_alone else hidden_TD[is_own_T]
            own_TD = own_TD[-LONGEST_MEMORY:]
            for context_D, decay in zip(self._context_SCD[slot], CONTEXT_DECAYS, strict=True):
                weight_T = np.power(decay, np.arange(len(own_TD))[::-1], dtype=np.float32)
                context_D *= decay ** len(own_TD)
                context_D += (1 - decay) * (weight_T @ own_TD)

    def routed(self, layer: int, experts_TK: Ints, logits_TE: Floats | None) -> Forecasts:  # noqa: ARG002
        """Updates the decaying sums with the step's tokens and returns the probabilities.

        With several requests they are means over the requests, as these share the cache.
        """
        experts_NK, hidden_ND = experts_TK[self._rows], self._hidden_ND
        means_FE = self._fading.add(layer, experts_NK, hidden_ND, is_one_request=self._is_alone)
        behind_E, matched = np.zeros(self.spec.num_experts, np.float32), 0
        if self._is_alone:
            hidden_ND = hidden_ND[-1:]
            self._history.set_experts(layer, experts_TK)
            behind_E, matched = self._history.uses_behind(layer), self._history.matched_tokens
        flags = np.array(flag_match(matched), np.float32)
        own_X = np.concatenate([means_FE.ravel(), behind_E.astype(np.float32), flags])
        own_NX = own_X[None].repeat(len(hidden_ND), axis=0)
        given = hidden_ND, own_NX, self._summary_NY
        (chance_NX,) = self._networks[layer].run([OUTPUT], {INPUT: given})
        chance_NHE = chance_NX.reshape(len(hidden_ND), len(HORIZONS), self.spec.num_experts)
        return [Forecast(layer, chance_NHE[0] if len(chance_NHE) == 1 else chance_NHE.mean(axis=0))]

    def end_step(self) -> None:
        self._live.release_ended()

    def files(self) -> dict[str, bytes]:
        graphs = {network_path(layer): graph for layer, graph in self._graphs.items()}
        tensors = write_tensors(self._fading.tensors())
        return {CONTEXT: self._context_graph} | graphs | tensors

    @classmethod
    def from_files(
        cls,
        spec: ModelSpec,
        files: Mapping[str, bytes],
        options: Mapping[str, Any],  # noqa: ARG003
    ) -> Self:
        graphs, arrays = read_layer_networks(
            spec, files, kind=cls.kind, path_of_layer=network_path, others=[CONTEXT]
        )
        return cls(spec, files[CONTEXT], graphs, arrays["routers"], arrays["biases"])
