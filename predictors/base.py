"""The protocol of predictors, shared by training, replay and live use.

Shape suffixes: T tokens of the step, D hidden size, E experts, K top_k.
"""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, ClassVar, Self, get_type_hints

import numpy as np

from predictors.errors import PredictorError, unknown
from predictors.metrics import CardAccuracy, Floats, Ints
from predictors.networks import kernels
from predictors.spec import ModelSpec
from predictors.typed_values import convert


class Signal(StrEnum):
    """A value of the model that a predictor can request; only requested ones are captured."""

    TOKENS = "tokens"
    LAYER_INPUT = "layer_input"
    GATE_INPUT = "gate_input"
    ROUTED = "routed"
    LOGITS = "logits"
    """The routers' scores of all experts, in addition to `ROUTED`; some models and all published
    routing logs lack them."""
    WEIGHTS = "weights"
    """The numbers by which the chosen experts' outputs are multiplied; for recordings."""


@dataclass(slots=True, eq=False)
class Forecast:
    """Scores of one layer's experts, for each token of the step."""

    layer: int
    """Target layer, counted over the layers with routed experts."""
    scores_TE: Floats
    """Probability, in [0, 1], that the token is routed to the expert."""
    wanted: Sequence[int] | None = None
    """Experts to fetch, in this order, if the predictor's paper defines how many; None: those of
    `experts`."""
    priority_E: Floats | None = None
    """Orders prefetches in place of the probability, larger first, at most 1, if the predictor's
    paper defines it; the system's `priority` adds the layer's distance."""
    _probability_E: Floats | None = field(default=None, init=False, repr=False)

    @property
    def probability_E(self) -> Floats:
        """Probability that *any* token of the step needs the expert, for independent tokens."""
        if self._probability_E is None:
            others_E = np.prod(1.0 - self.scores_TE, axis=0)
            self._probability_E = (1.0 - others_E).astype(np.float32, copy=False)
        return self._probability_E

    @property
    def expected_tokens_E(self) -> Floats:
        """Expected number of the step's tokens that are routed to the expert."""
        return self.scores_TE.sum(axis=0, dtype=np.float32)

    @property
    def order_E(self) -> Floats:
        """Order of prefetches within the layer, larger first, at most 1."""
        return self.probability_E if self.priority_E is None else self.priority_E

    def chosen_TK(self, top_k: int) -> Ints:
        """Returns each token's `top_k` best experts, best first; ties go to the lower id."""
        return np.argsort(-self.scores_TE, axis=1, kind="stable")[:, :top_k]

    def experts(self, top_k: int) -> list[int]:
        """Returns the experts to fetch: `wanted`, or the union of the tokens' best `top_k`.

        Those with the most expected tokens come first; those with none are left out.
        """
        if self.wanted is not None:
            return list(self.wanted)
        if can_rank(self.scores_TE):
            self._probability_E = np.empty(self.scores_TE.shape[1], np.float32)
            ((experts, _),) = kernels.rank(self.scores_TE, top_k, self._probability_E)
            return experts
        wanted = np.unique(self.chosen_TK(top_k))
        expected_E = self.expected_tokens_E
        wanted = wanted[expected_E[wanted] > 0]
        order = np.argsort(-expected_E[wanted], kind="stable")
        return wanted[order].tolist()

    def ranked(self, top_k: int) -> tuple[list[int], list[float]]:
        """Returns `experts` and the value of `order_E` of each."""
        experts, order_E = self.experts(top_k), self.order_E
        return experts, [order_E.item(e) for e in experts]


class ConsecutiveForecasts(Sequence[Forecast]):
    """Forecasts of consecutive layers.

    Args:
        first_layer: The first target.
        scores_THE: Scores of each target, as in `Forecast`.
    """

    __slots__ = ("first_layer", "scores_THE")

    def __init__(self, first_layer: int, scores_THE: Floats):
        self.first_layer = first_layer
        self.scores_THE = scores_THE

    def __len__(self) -> int:
        return self.scores_THE.shape[1]

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(len(self))[index]]
        h = range(len(self))[index]
        return Forecast(self.first_layer + h, self.scores_THE[:, h])

    def ranked_token(self, top_k: int) -> tuple[Floats, list[tuple[list[int], list[float]]]] | None:
        """Returns `probability_E` of each target, `[H, E]`, and `ranked` of each, at once.

        Only of a single token, with compiled code; otherwise None.
        """
        if not can_rank(self.scores_THE):
            return None
        probability_HE = np.empty(self.scores_THE.shape[1:], np.float32)
        return probability_HE, kernels.rank(self.scores_THE, top_k, probability_HE)


def can_rank(scores_T: Floats) -> bool:
    """Returns whether compiled code can rank the scores, which have to be of one token."""
    return (
        kernels is not None
        and len(scores_T) == 1
        and scores_T.dtype == np.float32
        and scores_T.flags.c_contiguous
    )


Forecasts = Sequence[Forecast]


class Predictor:
    """Receives the events of a step in the order in which a model produces them.

    `begin_step`, then for each layer `layer_input`, `gate_input`, `routed`, then `end_step`. Each
    may answer with forecasts. The arrays belong to the caller and may change after the call, a
    router's input after `routed` of its layer.
    A predictor overrides the events named in its `signals`; the others are never sent.
    """

    kind: ClassVar[str]
    """Its name in `predictors.registry`."""
    signals: ClassVar[frozenset[Signal]]
    stateless: ClassVar[bool] = False
    """A token's forecasts depend on that token alone, so tokens may come in any order."""

    def __init__(self, spec: ModelSpec):
        self.spec = spec
        self.card: CardAccuracy | None = None
        """Accuracy on the card of its zoo entry; None where there is none."""

    def listens(self, signal: Signal, layer: int) -> bool:
        """Returns whether it uses this signal of this layer; others need not be captured."""
        return signal in self.signals

    def begin_step(self, tokens_T: Ints, requests_T: Ints) -> Forecasts:
        """Receives the token ids that enter the model, and each one's request."""
        return ()

    def layer_input(self, layer: int, hidden_TD: Floats) -> Forecasts:
        """Receives the normalised hidden state that enters the layer, before its attention."""
        return ()

    def gate_input(self, layer: int, hidden_TD: Floats) -> Forecasts:
        """Receives the input of the layer's router."""
        return ()

    def routed(self, layer: int, experts_TK: Ints, logits_TE: Floats | None) -> Forecasts:
        """Receives the layer's chosen experts, and its logits if `LOGITS` was requested.

        The id `num_experts` stands for no choice.
        """
        return ()

    def end_step(self) -> None:
        """Ends the step; what was learned from it is used from the next step on."""

    def count_input_rows(self, requests_T: Ints) -> int:
        """Returns how many rows it computes for a step, given each token's request."""
        return len(requests_T)

    def files(self) -> dict[str, bytes]:
        """Returns the files of a zoo entry: path to bytes. Nothing is pickled."""
        raise NotImplementedError

    def options(self) -> dict[str, Any]:
        """Returns the options that `from_files` needs, as plain JSON values.

        These are the known options that the predictor keeps as attributes.
        """
        return {name: vars(self)[name] for name in known_options(type(self)) if name in vars(self)}

    def renewed(self) -> Self:
        """Returns the predictor as it is before its first step."""
        if self.stateless:
            return self
        return type(self).from_files(self.spec, self.files(), self.options())

    def as_learned(self) -> Self:
        """Returns the predictor whose files hold what it has learned while serving."""
        return self

    def for_all_tokens(self) -> Self:
        """Returns it renewed, with forecasts of all tokens of a prompt: to measure accuracy."""
        return self.renewed()

    @classmethod
    def from_files(
        cls, spec: ModelSpec, files: Mapping[str, bytes], options: Mapping[str, Any]
    ) -> Self:
        """Inverse of `files` and `options`; the bytes were checked against their digests before.

        Raises PredictorError if they do not match the model.
        """
        raise NotImplementedError


def known_options(cls: type[Predictor]) -> list[str]:
    """Returns the names of a kind's options: the keyword-only arguments of its constructor."""
    parameters = inspect.signature(cls).parameters.values()
    return [item.name for item in parameters if item.kind is inspect.Parameter.KEYWORD_ONLY]


def check_options(cls: type[Predictor], options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options as their declared types.

    Raises:
        PredictorError: The kind does not have one of them; the message lists the choices.
        ConfigError: A value is none of the option's type.
    """
    known, types = known_options(cls), get_type_hints(cls.__init__)
    for name in options:
        if name not in known:
            raise PredictorError(f"{cls.kind}: {unknown('option', name, known)}")
    return {
        name: convert(f"{cls.kind}: {name}", value, types[name]) for name, value in options.items()
    }


def softmax(logits_E: Floats) -> Floats:
    """Returns the probabilities of a router's logits, along the last axis."""
    shifted_E = np.exp(logits_E - logits_E.max(axis=-1, keepdims=True))
    return shifted_E / shifted_E.sum(axis=-1, keepdims=True)
