"""Residual: the target layers' own routers on the current state, and a learned correction.

Ours. It starts as skip (promoe 4.2) and repairs it: what lies between a state and a later router
(an expert layer, attention over the past) is learned, for several target layers at once. The past
is summed up in a few numbers for each request and source: means of earlier states that decay, fast
and slow.

Shape suffixes: T tokens, D hidden size, H targets of a source, E experts, C contexts carried in,
G decays, R numbers of a context for each decay, Q numbers of the token, S slots.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import numpy as np

from predictors.base import Floats, Forecast, Forecasts, Ints, Predictor, Signal
from predictors.errors import PredictorError
from predictors.learned import open_session
from predictors.requests import LiveRequests, grown
from predictors.spec import ModelSpec

if TYPE_CHECKING:
    import onnxruntime

HIDDEN, CARRY, MIX, TOKEN = "hidden", "carry", "mix", "token"
SCORES, AFTER, TOKEN_OUT = "scores", "after", "token_out"
"""Names in a graph: `hidden [T, D]`, `carry [G, C, R]`, `mix [G, T, C + T]` to
`scores [T, H, E]` and `after [G, T, R]`, all float32. The context of the tokens is
`mix @ concat(carry, states)`; `after` is the context of whatever token follows each of them.
The first layer's input is the token itself: its graph makes `token_out [T, Q]` of it, which all
other graphs take as `token`."""

LONGEST_RUN = 256
"""Tokens of a prompt that are forecast in one call: `mix` grows with their square."""


class Source(NamedTuple):
    """A moment of the step at which layers are forecast."""

    signal: Signal
    """LAYER_INPUT or GATE_INPUT."""
    layer: int

    def targets(self, num_layers: int, horizons: int) -> range:
        """A gate input is good for the layers after it; the first layer's input for as many from
        that layer on, so that the first layers are covered too; a later one's for its own layer,
        whose gate input the layer before it has forecast already."""
        if self.signal is Signal.GATE_INPUT:
            return range(self.layer + 1, min(num_layers, self.layer + 1 + horizons))
        return range(self.layer, min(num_layers, self.layer + (horizons if not self.layer else 1)))

    @property
    def path(self) -> str:
        """Where its graph lies inside a zoo entry."""
        return f"predictors/{self.signal}_{self.layer:02d}.onnx"


FIRST = Source(Signal.LAYER_INPUT, 0)
"""Forecasts the first layers, and says which token it is."""


def ahead(num_layers: int) -> list[Source]:
    """The first layer's input, and the gate input of each layer that has layers after it."""
    gates = [Source(Signal.GATE_INPUT, layer) for layer in range(num_layers - 1)]
    return [FIRST, *gates]


def arrivals(num_layers: int) -> list[Source]:
    """The later layers' inputs: horizon 0, the last word before the router itself."""
    return [Source(Signal.LAYER_INPUT, layer) for layer in range(1, num_layers)]


@dataclass(frozen=True)
class Run:
    """Rows of a step that one call forecasts: one token each of several requests, or a stretch of
    one request's prompt."""

    rows: slice
    slots: Ints
    """Where the contexts that they begin with are kept."""
    length: int
    """Tokens of each request in it."""


class Residual(Predictor):
    kind = "residual"
    signals = frozenset({Signal.LAYER_INPUT, Signal.GATE_INPUT})
    stateless = False

    def __init__(
        self,
        spec: ModelSpec,
        graphs: Mapping[Source, bytes],
        *,
        horizons: int,
        decays: Sequence[float],
    ):
        """
        Args:
            graphs: a whole ONNX file for each source of `ahead` and `arrivals`.
            horizons: layers that a gate input is good for.
            decays: of the means over earlier tokens, per token; 0 is the token before.
        """
        super().__init__(spec)
        needed = {*ahead(spec.num_layers), *arrivals(spec.num_layers)}
        if set(graphs) != needed:
            raise PredictorError(
                f"a residual predictor of {spec.num_layers} layers has networks for "
                f"{', '.join(source.path for source in sorted(needed))}; got "
                f"{', '.join(source.path for source in sorted(graphs)) or 'none'}"
            )
        self.horizons = horizons
        self._decays = tuple(decays)
        self._graphs = dict(graphs)
        self._sessions = {source: open_session(graph) for source, graph in graphs.items()}
        sizes = {
            check_graph(session, spec, source, horizons, len(self._decays))
            for source, session in self._sessions.items()
        }
        if len(sizes) > 1:
            raise PredictorError(f"the residual networks' contexts differ in size: {sorted(sizes)}")
        ((rank, _),) = sizes
        self._contexts = {
            source: np.zeros((1, len(self._decays), rank), np.float32) for source in graphs
        }
        self._live = LiveRequests()
        self._runs: list[Run] = []
        self._tokens: list[Floats] = []
        """`[T, Q]` of each run, from the step's first event on."""

    def begin_step(self, tokens_T: Ints, requests_T: Ints) -> Forecasts:  # noqa: ARG002
        present = self._live.begin_step(requests_T)
        for source, context in self._contexts.items():
            self._contexts[source] = context = grown(context, self._live.num_slots)
            context[present.new] = 0.0
        self._live.ended()
        self._runs = runs(present.slots_R[present.place_T])
        return ()

    def layer_input(self, layer: int, hidden_TD: Floats) -> Forecasts:
        return self._forecast(Source(Signal.LAYER_INPUT, layer), hidden_TD)

    def gate_input(self, layer: int, hidden_TD: Floats) -> Forecasts:
        return self._forecast(Source(Signal.GATE_INPUT, layer), hidden_TD)

    def _forecast(self, source: Source, hidden_TD: Floats) -> Forecasts:
        session = self._sessions.get(source)
        if session is None:
            return ()
        if source == FIRST:
            self._tokens = []
        context_SGR = self._contexts[source]
        found = []
        for number, run in enumerate(self._runs):
            given = {
                HIDDEN: np.ascontiguousarray(hidden_TD[run.rows], np.float32),
                CARRY: np.ascontiguousarray(context_SGR[run.slots].swapaxes(0, 1)),
                MIX: mix(len(run.slots), run.length, self._decays),
            }
            if source == FIRST:
                scores_THE, after_GTR, token_TQ = session.run([SCORES, AFTER, TOKEN_OUT], given)
                self._tokens.append(token_TQ)
            else:
                given[TOKEN] = self._tokens[number]
                scores_THE, after_GTR = session.run([SCORES, AFTER], given)
            context_SGR[run.slots] = after_GTR[:, run.length - 1 :: run.length].swapaxes(0, 1)
            found.append(scores_THE)
        whole_THE = found[0] if len(found) == 1 else np.concatenate(found)
        targets = source.targets(self.spec.num_layers, self.horizons)
        return [Forecast(target, whole_THE[:, h]) for h, target in enumerate(targets)]

    def files(self) -> dict[str, bytes]:
        return {source.path: graph for source, graph in self._graphs.items()}

    def options(self) -> dict[str, Any]:
        return {"horizons": self.horizons, "decays": list(self._decays)}

    @classmethod
    def from_files(
        cls, spec: ModelSpec, files: Mapping[str, bytes], options: Mapping[str, Any]
    ) -> Self:
        known = [*ahead(spec.num_layers), *arrivals(spec.num_layers)]
        graphs = {source: files[source.path] for source in known if source.path in files}
        decays = [float(one) for one in options["decays"]]
        return cls(spec, graphs, horizons=int(options["horizons"]), decays=decays)


def runs(slot_T: Ints) -> list[Run]:
    """A step's rows in calls: neighbours of one request together, single tokens all at once.

    A request whose rows do not stand together gets its context from whichever came last.
    """
    if len(slot_T) == 1:
        return [Run(slice(0, 1), slot_T, 1)]
    ends = [*(np.flatnonzero(slot_T[1:] != slot_T[:-1]) + 1).tolist(), len(slot_T)]
    if len(ends) == len(slot_T):
        return [Run(slice(0, len(slot_T)), slot_T, 1)]
    found = []
    start = 0
    for end in ends:
        for first in range(start, end, LONGEST_RUN):
            last = min(end, first + LONGEST_RUN)
            found.append(Run(slice(first, last), slot_T[first : first + 1], last - first))
        start = end
    return found


@lru_cache(maxsize=4 * LONGEST_RUN)
def mix(num_contexts: int, length: int, decays: tuple[float, ...]) -> Floats:
    """`[G, T, C + T]`: each token's context as a sum of the one that was carried in, decayed, and
    the states of the run's tokens before it, decayed. States carry the factor `1 - decay`
    themselves."""
    num_tokens = num_contexts * length
    matrix = np.zeros((len(decays), num_tokens, num_contexts + num_tokens), np.float32)
    rows, age = np.arange(num_tokens), np.arange(length)
    for g, decay in enumerate(decays):
        # 0 ** 0 is 1: without a mean, the first token's context is the one that was carried in.
        fading = np.power(decay, age)
        matrix[g, rows, rows // length] = np.tile(fading, num_contexts)
        for t in range(1, length):
            # One context only: runs of several tokens are of one request.
            matrix[g, t, num_contexts : num_contexts + t] = fading[:t][::-1]
    return matrix


def check_graph(
    session: "onnxruntime.InferenceSession",
    spec: ModelSpec,
    source: Source,
    horizons: int,
    num_decays: int,
) -> tuple[int, int]:
    """Sizes R and Q; PredictorError unless the network is one for this model and source."""
    inputs = {one.name: list(one.shape) for one in session.get_inputs()}
    shapes = inputs | {one.name: list(one.shape) for one in session.get_outputs()}
    token = TOKEN_OUT if source == FIRST else TOKEN
    rank, size = shapes.get(CARRY, [None])[-1], shapes.get(token, [None])[-1]
    num_targets = len(source.targets(spec.num_layers, horizons))
    wanted = {
        HIDDEN: ["tokens", spec.hidden_size],
        CARRY: [num_decays, "carried", rank],
        MIX: [num_decays, "tokens", "carried_and_tokens"],
        token: ["tokens", size],
        SCORES: ["tokens", num_targets, spec.num_experts],
        AFTER: [num_decays, "tokens", rank],
    }
    if shapes != wanted or not (isinstance(rank, int) and isinstance(size, int)):
        raise PredictorError(
            f"the residual network {source.path} has the shapes {shapes}; {spec.model_id} needs "
            f"{wanted}: it was made for another model"
        )
    return rank, size
