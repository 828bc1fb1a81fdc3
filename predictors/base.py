"""The one protocol that training, replay and live use share.

Shape suffixes: T tokens of the step, D hidden size, E experts, K top_k.
"""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from predictors.errors import PredictorError, unknown
from predictors.spec import ModelSpec

Floats = NDArray[np.float32]
Ints = NDArray[np.int64]


class Signal(StrEnum):
    """What a predictor can ask to be shown; only what somebody needs is captured."""

    TOKENS = "tokens"
    LAYER_INPUT = "layer_input"
    GATE_INPUT = "gate_input"
    ROUTED = "routed"
    LOGITS = "logits"
    """The routers' scores of all experts, beside the choices of `ROUTED`; not every model has
    them, and no published routing log."""


@dataclass(frozen=True)
class Forecast:
    """Scores of one layer's experts, for each token of the step."""

    layer: int
    """Target layer, counted over the layers with routed experts."""
    scores_TE: Floats
    """Chance, in [0, 1], that the token is routed to the expert."""
    wanted: Sequence[int] | None = None
    """Experts to fetch, first one first, where the predictor's paper says how many; None: those
    of `experts`."""
    priority_E: Floats | None = None
    """Urgency over all layers that are forecast, the larger the sooner, where the predictor's
    paper defines it; None leaves it to the system."""

    @cached_property
    def probability_E(self) -> Floats:
        """Chance that *some* token of the step needs the expert, tokens taken as independent."""
        return (1.0 - np.prod(1.0 - self.scores_TE, axis=0)).astype(np.float32)

    @cached_property
    def expected_tokens_E(self) -> Floats:
        """Expected number of the step's tokens that are routed to the expert."""
        return self.scores_TE.sum(axis=0, dtype=np.float32)

    def chosen_TK(self, top_k: int) -> Ints:
        """Each token's `top_k` best experts, best first; ties go to the lower id."""
        return np.argsort(-self.scores_TE, axis=1, kind="stable")[:, :top_k]

    def experts(self, top_k: int) -> list[int]:
        """What to fetch: `wanted`, or the union of the tokens' `top_k` best experts, the most
        tokens expected first. An expert that no token is expected on is not fetched.
        """
        if self.wanted is not None:
            return list(self.wanted)
        wanted = np.unique(self.chosen_TK(top_k))
        wanted = wanted[self.expected_tokens_E[wanted] > 0]
        order = np.argsort(-self.expected_tokens_E[wanted], kind="stable")
        return wanted[order].tolist()


Forecasts = Sequence[Forecast]


class Predictor:
    """Receives the events of a step in the order in which a model produces them.

    `begin_step`, then for each layer `layer_input`, `gate_input`, `routed`, then `end_step`. Each
    may answer with forecasts. The arrays belong to the caller and may change after the call.
    A predictor overrides the events named in its `signals`; the others are never sent.
    """

    kind: ClassVar[str]
    """Its row in `predictors.registry`."""
    signals: ClassVar[frozenset[Signal]]
    stateless: ClassVar[bool] = False
    """A token's forecasts depend on that token alone: tokens may come in any order and grouping."""

    def __init__(self, spec: ModelSpec):
        self.spec = spec

    def begin_step(self, tokens_T: Ints, requests_T: Ints) -> Forecasts:
        """Token ids that enter the model, and the request each belongs to."""
        return ()

    def layer_input(self, layer: int, hidden_TD: Floats) -> Forecasts:
        """Normalised hidden state that enters the layer, before its attention."""
        return ()

    def gate_input(self, layer: int, hidden_TD: Floats) -> Forecasts:
        """What the layer's router sees."""
        return ()

    def routed(self, layer: int, experts_TK: Ints, logits_TE: Floats | None) -> Forecasts:
        """What the layer's router said: chosen experts, and, to those that ask for `LOGITS`, its
        logits over all experts. The id `num_experts` stands for a choice of none.
        """
        return ()

    def end_step(self) -> None:
        """The step is over; what was learned from it counts from the next one on."""

    def files(self) -> dict[str, bytes]:
        """What it is made of, for a zoo entry: path inside the entry to bytes. Never pickled."""
        raise NotImplementedError

    def options(self) -> dict[str, Any]:
        """The rest of what `from_files` needs, as plain JSON values."""
        return {}

    @classmethod
    def from_files(
        cls, spec: ModelSpec, files: Mapping[str, bytes], options: Mapping[str, Any]
    ) -> Self:
        """Inverse of `files` and `options`; the bytes were checked against their digests before.

        Raises PredictorError when they do not fit the model.
        """
        raise NotImplementedError


def known_options(cls: type[Predictor]) -> set[str]:
    """Returns the names of a kind's options: the keyword-only arguments of its constructor."""
    parameters = inspect.signature(cls).parameters.values()
    return {one.name for one in parameters if one.kind is inspect.Parameter.KEYWORD_ONLY}


def check_options(cls: type[Predictor], options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options; PredictorError lists the choices if the kind does not have one."""
    known = known_options(cls)
    for name in options:
        if name not in known:
            raise PredictorError(f"{cls.kind}: {unknown('option', name, known)}")
    return dict(options)
