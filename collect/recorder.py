"""Collects the signals of a unit from the probes.

Shape suffixes: B prompts of the batch, S padded prompt length, T tokens of the step (B x S, then
B), N rows kept of a step, D hidden size, E experts, K top_k.
"""

from collections.abc import Callable, Collection, Sequence

import numpy as np
from numpy.typing import NDArray

from collect.errors import TraceError
from collect.traces.layout import TOKEN_DTYPES, TraceSignal, column_name
from collect.traces.writer import to_half
from predictors.base import Floats, Ints, Signal
from predictors.metrics import Phase

PROBES = {
    TraceSignal.LAYER_INPUT: Signal.LAYER_INPUT,
    TraceSignal.GATE_INPUT: Signal.GATE_INPUT,
    TraceSignal.GATE_LOGITS: Signal.LOGITS,
    TraceSignal.EXPERTS: Signal.ROUTED,
    TraceSignal.WEIGHTS: Signal.WEIGHTS,
}
"""The probe that delivers each signal."""


class SignalRecorder:
    """A `runtime.hf.probes.EventListener` that collects a unit, batch after batch.

    Rows of padding, and rows of a request from its end-of-text token on, are dropped.
    `on_rows` is called after each step with its number of rows.
    """

    def __init__(
        self,
        signals: Collection[TraceSignal],
        *,
        end_tokens: Collection[int],
        on_rows: Callable[[int], object] = lambda _: None,
    ):
        self._signals = frozenset(signals)
        self._end_tokens = np.array(sorted(end_tokens), dtype=np.int64)
        self._on_rows = on_rows
        self._pieces: dict[str, list[NDArray]] = {}
        self._requests_B = np.empty(0, np.int64)
        self._mask_BS = np.empty((0, 0), bool)
        self._alive_B = np.empty(0, bool)
        self._next_position_B = np.empty(0, np.int64)
        self._prompt_is_due = False
        self._num_tokens = 0
        self._num_rows = 0
        self._kept_N: NDArray[np.int64] | None = None
        """Rows of the step that are kept; None keeps all."""

    def begin_batch(self, requests: Sequence[int], mask_BS: NDArray) -> None:
        """Announces the prompts whose prefill is next; `mask_BS` is False for padding."""
        self._requests_B = np.asarray(requests, dtype=np.int64)
        self._mask_BS = np.asarray(mask_BS, dtype=bool)
        self._alive_B = np.ones(len(requests), dtype=bool)
        self._next_position_B = self._mask_BS.sum(axis=1)
        self._prompt_is_due = True

    def begin_step(self, tokens_T: Ints, _requests_T: Ints) -> None:
        if (tokens_T < 0).any():
            raise TraceError(
                "a trace contains token ids, which prompts given as embeddings do not have; "
                "pass input_ids to the model"
            )
        self._num_tokens = len(tokens_T)
        if self._prompt_is_due:
            self._begin_prefill(tokens_T)
        else:
            self._begin_decode(tokens_T)

    def _begin_prefill(self, tokens_T: Ints) -> None:
        assert tokens_T.size == self._mask_BS.size, "the prefill of a batch is one step"
        self._prompt_is_due = False
        self._choose(self._mask_BS.reshape(-1))
        positions_BS = np.cumsum(self._mask_BS, axis=1) - 1
        requests_BS = np.broadcast_to(self._requests_B[:, None], self._mask_BS.shape)
        self._keep_step(tokens_T, requests_BS.reshape(-1), positions_BS.reshape(-1), Phase.PREFILL)

    def _begin_decode(self, tokens_T: Ints) -> None:
        assert tokens_T.shape == self._alive_B.shape, "one token of each request in a step"
        self._alive_B &= ~np.isin(tokens_T, self._end_tokens)
        self._choose(self._alive_B)
        self._keep_step(tokens_T, self._requests_B, self._next_position_B, Phase.DECODE)
        self._next_position_B = self._next_position_B + 1

    def _choose(self, kept_T: NDArray[np.bool_]) -> None:
        self._kept_N = None if kept_T.all() else np.flatnonzero(kept_T)

    def _keep_step(self, tokens_T: Ints, requests_T: Ints, positions_T: Ints, phase: Phase) -> None:
        tokens_N = self._kept(tokens_T)
        self._num_rows = len(tokens_N)
        values = {
            "request": self._kept(requests_T),
            "position": self._kept(positions_T),
            "token": tokens_N,
            "phase": np.full(len(tokens_N), phase),
        }
        for name, dtype in TOKEN_DTYPES.items():
            self._add(name, values[name].astype(dtype))

    def layer_input(self, layer: int, hidden_TD: Floats) -> None:
        self._keep(TraceSignal.LAYER_INPUT, layer, hidden_TD)

    def gate_input(self, layer: int, hidden_TD: Floats) -> None:
        self._keep(TraceSignal.GATE_INPUT, layer, hidden_TD)

    def routed(
        self, layer: int, experts_TK: Ints, logits_TE: Floats | None, weights_TK: Floats | None
    ) -> None:
        self._keep(TraceSignal.EXPERTS, layer, experts_TK)
        self._keep(TraceSignal.GATE_LOGITS, layer, logits_TE)
        self._keep(TraceSignal.WEIGHTS, layer, weights_TK)

    def end_step(self) -> None:
        self._on_rows(self._num_rows)

    def _keep(self, signal: TraceSignal, layer: int, values_T: NDArray | None) -> None:
        if signal not in self._signals:
            return
        if values_T is not None and len(values_T) != self._num_tokens:
            raise TraceError(
                f"layer {layer} computes {len(values_T)} tokens in a step of {self._num_tokens}: "
                "only models that compute each token of a step can be recorded"
            )
        if values_T is None:
            rest = map(str, sorted(self._signals - {signal}))
            raise TraceError(
                f"the routers of this model return no {signal}: "
                f"record without it: signals=[{','.join(rest)}]"
            )
        half = to_half(self._kept(values_T), signal=signal, layer=layer)
        self._add(column_name(signal, layer), half)

    def _kept(self, values_T: NDArray) -> NDArray:
        if self._kept_N is None:
            return values_T
        # `take` gathers rows three times as fast as an index does.
        return values_T.take(self._kept_N, axis=0)

    def _add(self, name: str, values: NDArray) -> None:
        self._pieces.setdefault(name, []).append(values)

    def take(self) -> dict[str, NDArray]:
        """Returns the unit's columns, by request and token, and empties the recorder."""
        whole = {}
        order = np.lexsort(
            (np.concatenate(self._pieces["position"]), np.concatenate(self._pieces["request"]))
        )
        for name in list(self._pieces):
            whole[name] = np.concatenate(self._pieces.pop(name)).take(order, axis=0)
        return whole
