"""The residual predictor: the target layers' routers on the current state, plus a correction.

Not from a paper. It starts as skip (ProMoE, section 4.2) and learns a correction for what lies
between a state and a later router, for several target layers at once: for the experts that the
state's own layer has chosen a product of low rank each, so that most weights are of experts that
are not chosen and are not read; for attention over the past decaying means of earlier states.

Shape suffixes: T tokens, D hidden size, H targets of a source, E experts, G decays, R numbers of a
context for each decay, X = G R, Q numbers of the token, S slots, K top_k.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple, Self

import numpy as np

from predictors.base import ConsecutiveForecasts, Floats, Forecasts, Ints, Signal, softmax
from predictors.errors import PredictorError
from predictors.networks import kernels
from predictors.networks.network import Input, Network
from predictors.requests import LiveRequests, grow_rows
from predictors.spec import ModelSpec
from predictors.stored import Paths, StoredPredictor

HIDDEN, MEMORY, CHOSEN = "hidden", "memory", "chosen"
SCORES, STATE, TOKEN = "scores", "state", "token"
"""Names in a graph: `hidden [T, D]`, `memory [T, G R + Q]`, the context and the token, and `chosen
[T, E]`, shares of the layer's chosen experts (`share_chosen`), to `scores [T, H, E]` and `state
[T, G R]`, all float32. The first layer's input is the token itself: its graph makes `token [T, Q]`
of it, has no more than the context as `memory`, and nothing chosen yet.

A token's context is, for each decay, the decayed sum of the states before it; the states carry
the factor `1 - decay` themselves. It is summed up here and not in the graph: when one token is
generated, it is known before, and costs a product with the decays."""

ANSWERS, FIRST_ANSWERS = [SCORES, STATE], [SCORES, STATE, TOKEN]

PROMPT_WINDOW = 16

LONGEST_RUN = 256
"""Tokens of a prompt that are forecast in one call: `mixing_matrix` grows with their square."""


NOTHING: Floats = np.empty((0, 0), np.float32)


class ForecastSource(NamedTuple):
    """An event of a step at which layers are forecast."""

    signal: Signal
    """LAYER_INPUT or GATE_INPUT."""
    layer: int

    def targets(self, num_layers: int, horizons: int) -> range:
        """Returns the layers that it forecasts.

        A gate input forecasts the layers after it, the first layer's input as many from its own
        layer on, which covers the first layers.
        """
        first = self.layer + (self.signal is Signal.GATE_INPUT)
        return range(first, min(num_layers, first + horizons))

    @property
    def path(self) -> str:
        return f"predictors/{self.signal}_{self.layer:02d}.onnx"


FIRST_SOURCE = ForecastSource(Signal.LAYER_INPUT, 0)
"""Forecasts the first layers, and makes the features of the token."""


def list_sources(num_layers: int) -> list[ForecastSource]:
    """Returns the first layer's input, and the gate inputs of all layers but the last."""
    gates = [ForecastSource(Signal.GATE_INPUT, layer) for layer in range(num_layers - 1)]
    return [FIRST_SOURCE, *gates]


@dataclass(frozen=True)
class TokenRun:
    """Rows of a step that one call forecasts.

    They are one token each of several requests, or consecutive tokens of one request's prompt.
    """

    rows: slice
    slots: Ints | slice
    """Rows of the contexts at their beginning; a slice for one request, which is faster."""
    length: int
    """Number of tokens of each request in it."""
    answers: Ints | None = None
    """For each token of a prompt, the row of the call whose forecasts it gets; None: its own."""


class ResidualPredictor(StoredPredictor):
    """Forecasts experts with small networks on the residual stream, one for each `ForecastSource`.

    Args:
        graphs: a whole ONNX file for each of `list_sources`.
        horizons: number of layers that a gate input forecasts.
        decays: of the means over earlier tokens, per token; 0 is the token before.
        prompt_window: Last tokens of a prompt that are looked at. Their forecasts stand for those
            of the whole prompt, which needs most experts anyway, and whose own would be late; the
            means fade so fast that tokens before the window hardly count. None: all tokens.
    """

    kind = "residual"
    signals = frozenset({Signal.LAYER_INPUT, Signal.GATE_INPUT, Signal.ROUTED, Signal.LOGITS})
    stateless = False

    def __init__(
        self,
        spec: ModelSpec,
        graphs: Mapping[ForecastSource, bytes],
        *,
        horizons: int,
        decays: Sequence[float],
        prompt_window: int | None = PROMPT_WINDOW,
    ):
        super().__init__(spec)
        if prompt_window is not None and not 1 <= prompt_window <= LONGEST_RUN:
            raise PredictorError(
                f"residual: prompt_window={prompt_window}: must be 1 to {LONGEST_RUN}"
            )
        self.horizons = horizons
        self.prompt_window = prompt_window
        self._decays = tuple(map(float, decays))
        networks = self.open_networks(graphs)
        sizes = {
            check_residual_graph(network, spec, source, horizons, len(self._decays))
            for source, network in networks.items()
        }
        if len(sizes) > 1:
            raise PredictorError(f"the residual networks' contexts differ in size: {sorted(sizes)}")
        ((size, self._token_size),) = sizes
        self._fading_X = np.repeat(np.array(self._decays, np.float32), size // len(self._decays))
        self._states: dict[tuple[Signal, int], _SourceState] = {}
        for source, network in networks.items():
            first_target = source.targets(spec.num_layers, horizons)[0]
            context_SX = np.zeros((1, size), np.float32)
            self._states[source] = _SourceState(
                source == FIRST_SOURCE, network, first_target, context_SX
            )
        self._live = LiveRequests()
        self._runs: list[TokenRun] = []
        self._tokens: list[Floats] = []
        """`[T, Q]` of each run, known after the step's first event."""
        self._gate_TD: Floats = NOTHING
        """The router's input of the layer that comes next."""

    def listens(self, signal: Signal, layer: int) -> bool:
        source = signal if signal is Signal.LAYER_INPUT else Signal.GATE_INPUT
        return (source, layer) in self._states

    def begin_step(self, tokens_T: Ints, requests_T: Ints) -> Forecasts:  # noqa: ARG002
        present = self._live.begin_step(requests_T)
        if present.new:
            for state in self._states.values():
                state.context_SX = grow_rows(state.context_SX, self._live.num_slots)
                state.context_SX[present.new] = 0.0
        self._live.release_ended()
        slots_T = present.slots_R[present.request_T]
        self._runs = split_into_runs(slots_T, window=self.prompt_window)
        return ()

    def layer_input(self, layer: int, hidden_TD: Floats) -> Forecasts:
        state = self._states.get((Signal.LAYER_INPUT, layer))
        return () if state is None else self._forecast(state, hidden_TD)

    def gate_input(self, layer: int, hidden_TD: Floats) -> Forecasts:  # noqa: ARG002
        self._gate_TD = hidden_TD
        return ()

    def routed(self, layer: int, experts_TK: Ints, logits_TE: Floats | None) -> Forecasts:
        state = self._states.get((Signal.GATE_INPUT, layer))
        if state is None:
            return ()
        if logits_TE is None:
            raise PredictorError(f"the router of layer {layer} gives no logits")
        return self._forecast(state, self._gate_TD, (experts_TK, logits_TE))

    def _forecast(
        self, state: "_SourceState", hidden_TD: Floats, routing: tuple[Ints, Floats] | None = None
    ) -> Forecasts:
        """Forecasts from hidden states; `routing`: the layer's `([T, K], [T, E])`, if known."""
        hidden_TD = np.ascontiguousarray(hidden_TD, np.float32)
        if routing is None:
            self._tokens = []
        scores = []
        for number, run in enumerate(self._runs):
            given: dict[str, Input] = {HIDDEN: hidden_TD[run.rows]}
            context_RX = before_TX = state.context_SX[run.slots]
            if routing is not None:
                given[CHOSEN] = share_chosen(routing[0][run.rows], routing[1][run.rows])
            if run.length > 1:
                before_TX = self._compute_contexts(state, given, before_TX)
            given[MEMORY] = (before_TX, *([] if state.is_first else [self._tokens[number]]))
            wanted = FIRST_ANSWERS if state.is_first else ANSWERS
            scores_THE, state_TX, *token = state.network.run(wanted, given)
            self._tokens += token
            if run.length > 1:
                context_RX[:], state_TX = before_TX[-1:], state_TX[-1:]
            decay(context_RX, self._fading_X, state_TX)
            if not isinstance(run.slots, slice):
                state.context_SX[run.slots] = context_RX
            scores.append(scores_THE if run.answers is None else scores_THE[run.answers])
        whole_THE = scores[0] if len(scores) == 1 else np.concatenate(scores)
        return ConsecutiveForecasts(state.first_target, whole_THE)

    def _compute_contexts(
        self, state: "_SourceState", given: Mapping[str, Input], context_1X: Floats
    ) -> Floats:
        """Computes the prompt's states, and returns the context of each token, `[T, G R]`."""
        num_tokens = len(given[HIDDEN])
        size = context_1X.shape[1] + (0 if state.is_first else self._token_size)
        nothing = np.zeros((num_tokens, size), np.float32)
        (state_TX,) = state.network.run([STATE], {**given, MEMORY: nothing})
        past_PX = np.concatenate([context_1X, state_TX])
        by_decay = np.split(past_PX, len(self._decays), axis=1)
        mixed = [
            mixing_matrix(num_tokens, decay) @ past_PR
            for decay, past_PR in zip(self._decays, by_decay, strict=True)
        ]
        return np.concatenate(mixed, axis=1)

    def count_input_rows(self, requests_T: Ints) -> int:
        """Returns two for each token of a prompt that is looked at: its state is computed first."""
        lengths = Counter(requests_T.tolist()).values()
        looked_at = (min(length, self.prompt_window or length) for length in lengths)
        return sum(1 if number == 1 else 2 * number for number in looked_at)

    @classmethod
    def graph_paths(cls, spec: ModelSpec) -> Paths:
        return {source: source.path for source in list_sources(spec.num_layers)}

    def for_all_tokens(self) -> Self:
        whole = {**self.options(), "prompt_window": None}
        return self.from_files(self.spec, self.files(), whole)

    def options(self) -> dict[str, Any]:
        return {
            "horizons": self.horizons,
            "decays": list(self._decays),
            "prompt_window": self.prompt_window,
        }


@dataclass(slots=True)
class _SourceState:
    is_first: bool
    network: Network
    first_target: int
    context_SX: Floats
    """Contexts by slot of a request."""


def share_chosen(experts_TK: Ints, logits_TE: Floats) -> Floats:
    """Returns `[T, E]`: of a token's chosen experts top_k times their probability, 0 of the others.

    The id E is no choice.
    """
    shares_TE = np.zeros_like(logits_TE)
    if kernels is not None and len(experts_TK) == 1:
        kernels.share_chosen(experts_TK[0].tolist(), logits_TE[0], shares_TE[0])
        return shares_TE
    chance_TE = softmax(logits_TE)
    for experts_K, chance_E, shares_E in zip(experts_TK, chance_TE, shares_TE, strict=True):
        chosen = [expert for expert in experts_K if expert < len(chance_E)]
        shares_E[chosen] = len(experts_K) * chance_E[chosen]
    return shares_TE


def split_into_runs(slot_T: Ints, *, window: int | None = None) -> list[TokenRun]:
    """Divides a step's rows into calls: consecutive rows of one request, or all single tokens.

    A request whose rows are not consecutive gets the context of the last ones.

    Args:
        slot_T: Row of each token's context.
        window: Number of last rows of a request whose forecasts stand for all; None: all.
    """
    if len(slot_T) == 1:
        return [TokenRun(slice(0, 1), one_row(slot_T[0]), 1)]
    ends = [*(np.flatnonzero(slot_T[1:] != slot_T[:-1]) + 1).tolist(), len(slot_T)]
    if len(ends) == len(slot_T):
        return [TokenRun(slice(0, len(slot_T)), slot_T, 1)]
    calls = []
    start = 0
    for end in ends:
        length = end - start
        if window is not None and length > window:
            answers = np.arange(length) * window // length
            rows = slice(end - window, end)
            calls.append(TokenRun(rows, one_row(slot_T[start]), window, answers))
            start = end
            continue
        for first in range(start, end, LONGEST_RUN):
            last = min(end, first + LONGEST_RUN)
            calls.append(TokenRun(slice(first, last), one_row(slot_T[first]), last - first))
        start = end
    return calls


def decay(context_RX: Floats, fading_X: Floats, state_RX: Floats) -> None:
    """Replaces contexts by those after another token, in place."""
    if kernels is not None and len(context_RX) == 1:
        kernels.decay(context_RX, fading_X, state_RX)
    else:
        context_RX *= fading_X
        context_RX += state_RX


def one_row(slot: int) -> slice:
    return slice(int(slot), int(slot) + 1)


@lru_cache(maxsize=4 * LONGEST_RUN)
def mixing_matrix(length: int, decay: float) -> Floats:
    """Returns `[T, 1 + T]`: each token's context as a sum of decayed earlier states.

    Column 0 weights the context at the beginning of the run.
    """
    # 0 ** 0 is 1: without a mean, the first token's context is the one that the run begins with.
    fading = np.power(decay, np.arange(length)).astype(np.float32)
    matrix = np.zeros((length, 1 + length), np.float32)
    matrix[:, 0] = fading
    for t in range(1, length):
        matrix[t, 1 : 1 + t] = fading[:t][::-1]
    return matrix


def check_residual_graph(
    network: Network, spec: ModelSpec, source: ForecastSource, horizons: int, num_decays: int
) -> tuple[int, int]:
    """Returns the sizes of context and token.

    Raises PredictorError if the network does not match the model and source.
    """
    shapes = {**network.inputs, **network.outputs}
    state, memory = (shapes.get(name, [None])[-1] for name in (STATE, MEMORY))
    size = shapes.get(TOKEN, [None])[-1]
    if source != FIRST_SOURCE and isinstance(state, int) and isinstance(memory, int):
        size = memory - state
    num_targets = len(source.targets(spec.num_layers, horizons))
    wanted = {
        HIDDEN: ["tokens", spec.hidden_size],
        MEMORY: ["tokens", memory],
        SCORES: ["tokens", num_targets, spec.num_experts],
        STATE: ["tokens", state],
    }
    if source == FIRST_SOURCE:
        wanted |= {TOKEN: ["tokens", size], MEMORY: ["tokens", state]}
    else:
        wanted[CHOSEN] = ["tokens", spec.num_experts]
    fits = isinstance(state, int) and isinstance(size, int) and size > 0
    if shapes != wanted or not fits or state % num_decays:
        raise PredictorError(
            f"the residual network {source.path} has the shapes {shapes}; {spec.model_id} needs "
            f"{wanted}: it was made for another model"
        )
    return state, size
