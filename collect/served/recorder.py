"""Copies what routers see and choose while a server answers, for a sample of its requests.

Shape suffixes: T tokens of the step, W rows of a request that are recorded, D hidden size,
E experts, K top_k.
"""

import hmac
import logging
import random
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedModel

from collect.errors import TraceError
from collect.recorder import PROBES
from collect.served.trace_thread import MEMORY_BYTES, TraceThread
from collect.traces.growing import GrowingTrace, ServedRequest
from collect.traces.layout import TraceSignal, column_name, row_bytes
from collect.traces.writer import to_half
from predictors.base import Floats, Ints, Signal
from predictors.spec import ModelSpec
from runtime.generation.lockstep.blocks import BlockTask
from runtime.generation.lockstep.sequence import SequenceTask, current_sequence
from runtime.hf.probes import Probes
from runtime.serving.choice import CompletionChoice, FinishReason
from runtime.serving.recording import RecordingCounts, RequestRecorder

log = logging.getLogger(__name__)

SIGNALS = (
    TraceSignal.LAYER_INPUT,
    TraceSignal.GATE_INPUT,
    TraceSignal.EXPERTS,
    TraceSignal.WEIGHTS,
)
"""Signals that predictors of `system=moecast`, and those compared with them, are trained on."""


Column = tuple[TraceSignal, int]
"""A signal of a layer."""


class RequestRows:
    """The recorded rows of a running request: those around the end of its prompt.

    A row is a position. Steps that repeat positions, after drafted tokens were rejected or a step
    has failed, replace their rows.
    """

    def __init__(self, choice: CompletionChoice, *, num_tokens: int, reserved_bytes: int):
        prompt = len(choice.prompt)
        self.choice = choice
        self.reserved_bytes = reserved_bytes
        self.first_position = max(0, prompt - num_tokens)
        self.end_position = last_position(choice, num_tokens)
        self.num_computed = 0
        """Positions from 0 on that whole steps have computed."""
        self.columns: dict[Column, NDArray] = {}

    def next_position(self) -> int:
        """Returns the position of the first token of the next step."""
        choice = self.choice
        # The last token that was drawn has not been computed.
        return (
            len(choice.prompt) + choice.num_tokens - 1 if choice.num_tokens else self.num_computed
        )

    def keep(self, column: Column, values_TX: NDArray, *, start: int) -> None:
        """Copies the values of tokens from the position `start` on.

        As they are: to round them to half precision would take three times as long, on the
        thread that computes the model.
        """
        rows_WX = self.columns.get(column)
        if rows_WX is None:
            shape = self.end_position - self.first_position, values_TX.shape[1]
            rows_WX = self.columns[column] = np.empty(shape, values_TX.dtype)
        first = max(start, self.first_position)
        end = min(start + len(values_TX), self.end_position)
        if first < end:
            rows_WX[first - self.first_position : end - self.first_position] = values_TX[
                first - start : end - start
            ]

    def finish(self) -> "FinishedRows | None":
        """Returns the rows of a request that has ended; None if some were not computed."""
        prompt, drawn = len(self.choice.prompt), self.choice.num_tokens
        end = min(prompt + drawn - 1, self.end_position)
        if self.num_computed < end or end <= self.first_position:
            return None
        num_rows = end - self.first_position
        return FinishedRows(
            first_position=self.first_position,
            prompt_tokens=min(prompt, end) - self.first_position,
            columns={column: rows[:num_rows] for column, rows in self.columns.items()},
        )


@dataclass(frozen=True, kw_only=True)
class FinishedRows:
    """The rows of a request that has ended, as the model computed them."""

    first_position: int
    prompt_tokens: int
    columns: Mapping[Column, NDArray]

    def round(self, digest: str) -> ServedRequest:
        """Returns the rows as they are stored.

        Raises:
            TraceError: a value is not finite in half precision.
        """
        columns = {}
        for (signal, layer), values in self.columns.items():
            columns[column_name(signal, layer)] = to_half(values, signal=signal, layer=layer)
            # Lets the thread that computes the model run, which would wait for milliseconds.
            time.sleep(0)
        return ServedRequest(
            digest=digest,
            first_position=self.first_position,
            prompt_tokens=self.prompt_tokens,
            columns=columns,
        )


def last_position(choice: CompletionChoice, num_tokens: int) -> int:
    """Returns the position behind the last one that is recorded, however long the answer is."""
    return len(choice.prompt) + min(choice.sampling.max_new_tokens - 1, num_tokens)


class StepRows:
    """The recorded requests of a forward pass."""

    def __init__(self, requests: list[tuple[RequestRows, int, int]], num_tokens: int):
        self.requests = requests
        """Request, its first row in the step, its position."""
        self.num_tokens = num_tokens
        self.columns: set[Column] = set()
        """Columns that the step has given so far."""


class SignalSampler(RequestRecorder):
    """Records a sample of a server's requests into a trace.

    All is called in the engine thread, and the events of a forward pass in the coroutine of its
    sequence. Values are copied as `collect.recorder.SignalRecorder` copies them; writing is the
    business of another thread. Nothing here raises an error into a request.

    Args:
        folder: the trace; made if it is missing.
        fraction: share of the requests that are recorded, drawn at random.
        num_tokens: last tokens of a prompt, and first tokens of an answer, to record.
        max_bytes: size of the trace at which recording ends.
        draw: draws a number of [0, 1).
    """

    def __init__(
        self,
        folder: Path,
        *,
        fraction: float,
        num_tokens: int,
        max_bytes: int,
        draw: Callable[[], float] = random.random,
    ):
        self._folder = folder
        self._fraction = fraction
        self._num_tokens = num_tokens
        self._max_bytes = max_bytes
        self._draw = draw
        # Equal prompts get equal digests, and so the same split; nobody can test a guess with them.
        self._key = secrets.token_bytes(32)
        self._thread: TraceThread | None = None
        self._row_bytes = 0
        """Memory for a row until it is written."""
        self._running: dict[SequenceTask, RequestRows] = {}
        self._steps: dict[SequenceTask, StepRows] = {}
        """Forward passes that have begun, of which sequences in lockstep have one each."""

    def attach(self, model: PreTrainedModel) -> None:
        handle = model.moecast
        if model.config.is_encoder_decoder:
            raise TraceError(
                f"record={self._folder}: {type(model).__name__} has an encoder, and a "
                f"trace has all layers for each token. Leave record out"
            )
        self._set_sizes(handle.spec)
        try:
            trace = GrowingTrace(self._folder, handle.spec)
        except OSError as error:
            raise TraceError(
                f"record={self._folder} cannot be written ({error}): name another folder"
            ) from error
        self._thread = TraceThread(trace, max_bytes=self._max_bytes)
        log.info(
            "recording hidden states and routing of %g %% of the requests into %s; no texts",
            100 * self._fraction,
            self._folder,
        )
        Probes(
            model,
            {PROBES[signal] for signal in SIGNALS},
            self,
            layers=handle.layers,
            listens=self._listens,
        )

    def _set_sizes(self, spec: ModelSpec) -> None:
        # Three times: in single precision, and then rounded.
        self._row_bytes = 3 * row_bytes(spec, SIGNALS)
        most = MEMORY_BYTES // self._row_bytes // 2
        if self._num_tokens > most:
            raise TraceError(
                f"record_tokens={self._num_tokens}: with this model one request could take "
                f"{2 * self._num_tokens * self._row_bytes:,} bytes of memory, of {MEMORY_BYTES:,}; "
                f"at most {most}"
            )

    def counts(self) -> RecordingCounts:
        return self.nothing if self._thread is None else self._thread.counts()

    def close(self) -> None:
        if self._thread is not None:
            self._thread.close()

    # ---- events of the service

    def on_started(self, choice: CompletionChoice) -> None:
        assert self._thread is not None
        assert choice.task is not None
        # The logits of a whole prompt take a forward pass more.
        is_plain = choice.sampling.max_new_tokens > 0 and not choice.sampling.prompt_logprobs
        if not is_plain or self._draw() >= self._fraction:
            return
        first = max(0, len(choice.prompt) - self._num_tokens)
        num_rows = last_position(choice, self._num_tokens) - first
        reserved = num_rows * self._row_bytes
        if self._thread.reserve(reserved):
            self._running[choice.task] = RequestRows(
                choice, num_tokens=self._num_tokens, reserved_bytes=reserved
            )

    def on_ended(self, choice: CompletionChoice) -> None:
        request = self._running.pop(choice.task, None) if choice.task is not None else None
        if request is None:
            return
        assert self._thread is not None
        rows = None
        if choice.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
            rows = request.finish()
        if rows is None:
            self._thread.cancel(request.reserved_bytes)
        else:
            digest = self._digest(choice.prompt)
            self._thread.finish(partial(rows.round, digest), reserved_bytes=request.reserved_bytes)

    def _digest(self, prompt: list[int]) -> str:
        tokens = np.array(prompt, np.int64).tobytes()
        return hmac.digest(self._key, tokens, "sha256").hex()

    # ---- events of the model (`EventListener`)

    def _listens(self, _signal: Signal, _layer: int) -> bool:
        return bool(self._steps) and current_sequence() in self._steps

    def begin_step(self, tokens_T: Ints, _requests_T: Ints) -> None:
        sequence = current_sequence()
        if sequence is None or not self._running:
            return
        members = sequence.members if isinstance(sequence, BlockTask) else (sequence,)
        requests = []
        for row, member in enumerate(members):
            request = self._running.get(member)
            if request is not None:
                position = request.next_position()
                if position < request.end_position:
                    requests.append((request, row, position))
        if requests:
            self._steps[sequence] = StepRows(requests, len(tokens_T))

    def layer_input(self, layer: int, hidden_TD: Floats) -> None:
        self._keep(TraceSignal.LAYER_INPUT, layer, hidden_TD)

    def gate_input(self, layer: int, hidden_TD: Floats) -> None:
        self._keep(TraceSignal.GATE_INPUT, layer, hidden_TD)

    def routed(
        self, layer: int, experts_TK: Ints, logits_TE: Floats | None, weights_TK: Floats | None
    ) -> None:
        del logits_TE  # Not among the signals.
        self._keep(TraceSignal.EXPERTS, layer, experts_TK)
        if weights_TK is not None:
            self._keep(TraceSignal.WEIGHTS, layer, weights_TK)

    def _keep(self, signal: TraceSignal, layer: int, values_TX: NDArray) -> None:
        sequence = current_sequence()
        assert sequence is not None
        step = self._steps[sequence]
        if len(values_TX) != step.num_tokens:
            return  # A model that computes some of the tokens only: the step stays incomplete.
        column = signal, layer
        step.columns.add(column)
        is_block = isinstance(sequence, BlockTask)
        for request, row, position in step.requests:
            own_TX = values_TX[row : row + 1] if is_block else values_TX
            request.keep(column, own_TX, start=position)

    def end_step(self) -> None:
        sequence = current_sequence()
        step = None if sequence is None else self._steps.pop(sequence, None)
        if step is None:
            return
        is_block = isinstance(sequence, BlockTask)
        for request, _, position in step.requests:
            # A step that has failed lacks layers; a request that goes on repeats it.
            if step.columns and len(step.columns) == len(request.columns):
                request.num_computed = position + (1 if is_block else step.num_tokens)
