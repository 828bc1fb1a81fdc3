"""Model shapes and steps for tests of predictors, small enough to work out by hand."""

import numpy as np

from predictors.base import Forecast, Predictor, Signal
from predictors.spec import ModelSpec
from tests.builders.entries import tiny_spec


def small_spec(**sizes: int) -> ModelSpec:
    """Three layers of four experts, of which one is chosen."""
    return tiny_spec(**{"num_layers": 3, "num_experts": 4, "top_k": 1, "hidden_size": 2} | sizes)


class SignalLog(Predictor):
    """Asks for every signal, keeps what it was shown of each step, forecasts nothing."""

    kind = "signal-log"
    signals = frozenset(Signal)

    def __init__(self, spec: ModelSpec):
        super().__init__(spec)
        self.steps: list[list[tuple[str, int, np.ndarray]]] = []
        """Name, layer and rows of each event; the tokens and their requests come first."""

    def _keep(self, layer: int, **arrays: np.ndarray) -> tuple[()]:
        self.steps[-1] += [(name, layer, array.copy()) for name, array in arrays.items()]
        return ()

    def begin_step(self, tokens_T, requests_T):
        self.steps.append([])
        return self._keep(-1, tokens=tokens_T, requests=requests_T)

    def layer_input(self, layer, hidden_TD):
        return self._keep(layer, layer_input=hidden_TD)

    def gate_input(self, layer, hidden_TD):
        return self._keep(layer, gate_input=hidden_TD)

    def routed(self, layer, experts_TK, logits_TE):
        return self._keep(layer, experts=experts_TK, logits=logits_TE)


def token_step(*experts: int) -> np.ndarray:
    """One token: its expert at each layer."""
    return np.array(experts)[:, None, None]


def serve(
    predictor: Predictor, chosen_LTK, requests=None, *, logits_LTE=None, entering_TD=None
) -> dict[int, dict[int, Forecast]]:
    """One whole step; what was answered, by the layer just routed (-1: before any) and target.

    The id of a token is the number of its request. The states that enter layer 0 are those that
    enter each router, too.
    """
    owners = np.array(requests if requests is not None else [0] * chosen_LTK.shape[1])
    answers = [list(predictor.begin_step(owners, owners))]
    if entering_TD is not None:
        answers[0] += predictor.layer_input(0, entering_TD)
    for layer, chosen_TK in enumerate(chosen_LTK):
        logits_TE = None if logits_LTE is None else logits_LTE[layer]
        answers.append(list(predictor.routed(layer, chosen_TK, logits_TE)))
        if entering_TD is not None:
            answers[-1] += predictor.gate_input(layer, entering_TD)
    predictor.end_step()
    return {at - 1: {one.layer: one for one in found} for at, found in enumerate(answers)}
