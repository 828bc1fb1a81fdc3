"""The lockstep scheduler: synchronises sequences and merges their events for the engine.

Shape suffixes: T tokens, D hidden size, K top_k, E experts.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np
from torch import Tensor

from predictors.base import Floats, Ints
from predictors.errors import MoecastError
from runtime.engine.engine import Engine
from runtime.generation.lockstep.sequence import (
    CapturedSignals,
    SequenceTask,
    SyncPoint,
    Yield,
    current_sequence,
    yield_until_resumed,
)
from runtime.hf.dense_stream import DenseStream
from runtime.hf.model_faults import is_out_of_memory
from runtime.hf.probes import Probes
from runtime.store.ggml.matrix import ExpertWeights
from runtime.transfer.arena import SlotTable

Array = TypeVar("Array", Floats, Ints)


class LockstepScheduler:
    """Receives the model's events in place of the engine while a lockstep group is open.

    Events of the group's sequences suspend them until all have reached the same point; events of
    other threads go straight to the engine.
    """

    def __init__(self, engine: Engine, probes: Probes, *, dense_stream: DenseStream | None = None):
        self.engine = engine
        self._dense_stream = dense_stream
        self._probes = probes
        self._running: list[SequenceTask] = []
        """Sequences of the current forward pass."""
        self._is_complete = False
        """True while no sequence has left during this step: joined arrays then have one row for
        each of the step's tokens."""
        self._routed_layers: set[int] = set()
        """Layers of this step whose routing was passed to the engine."""
        self._pinned: tuple[int, int] | None = None
        """(layer, expert) that the running sequence's own loop was given last."""

    # ---- called by the sequences: a probes' listener

    def _suspendable(self) -> SequenceTask | None:
        """Return the calling sequence if it has to wait for others, else None."""
        sequence = current_sequence()
        if sequence is None or (len(self._running) == 1 and self._is_complete):
            return None
        return sequence if sequence in self._running else None

    def begin_step(self, tokens_T: Ints, requests_T: Ints) -> None:
        sequence = current_sequence()
        if sequence is None:
            self.engine.begin_step(tokens_T, requests_T)
        else:
            yield_until_resumed(sequence, sequence.request_step(tokens_T, requests_T))

    def layer_input(self, layer: int, hidden_TD: Floats) -> None:
        hidden_TD = _drop_spare_rows(hidden_TD)
        sequence = self._suspendable()
        if sequence is None:
            self.engine.layer_input(layer, hidden_TD)
        else:
            sequence.captured[layer] = CapturedSignals(hidden_TD=hidden_TD.copy())
            yield_until_resumed(sequence, Yield(SyncPoint.INPUT, layer))

    def gate_input(self, layer: int, hidden_TD: Floats) -> None:
        hidden_TD = _drop_spare_rows(hidden_TD)
        sequence = self._suspendable()
        if sequence is None:
            self.engine.gate_input(layer, hidden_TD)
        else:
            captured = sequence.captured.setdefault(layer, CapturedSignals())
            captured.gate_TD = hidden_TD.copy()

    def routed(
        self, layer: int, experts_TK: Ints, logits_TE: Floats | None, weights_TK: Floats | None
    ) -> None:
        experts_TK = _drop_spare_rows(experts_TK)
        logits_TE = None if logits_TE is None else _drop_spare_rows(logits_TE)
        sequence = self._suspendable()
        if sequence is None:
            self.engine.routed(layer, experts_TK, logits_TE, weights_TK)
            self._read_next_dense(layer)
            return
        captured = sequence.captured.setdefault(layer, CapturedSignals())
        captured.experts_TK = experts_TK.copy()
        captured.logits_TE = None if logits_TE is None else logits_TE.copy()
        if self._is_complete:
            self.engine.partly_routed(layer, experts_TK)

    def end_step(self) -> None:
        sequence = current_sequence()
        if sequence is None:
            self.engine.end_step()
        elif sequence in self._running:  # else it was cancelled before its forward pass began
            yield_until_resumed(sequence, Yield(SyncPoint.FORWARD_PASS_ENDED))

    # ---- called by the sequences: a source of experts

    def ready(self, layer: int, wanted: list[int]) -> Iterator[dict[int, ExpertWeights]]:
        sequence = self._suspendable()
        if sequence is None:
            return self.engine.ready(layer, wanted)
        return _receive_experts(sequence, layer, wanted)

    def ready_slots(self, layer: int, wanted: list[int]) -> Iterator[dict[int, int]]:
        sequence = self._suspendable()
        if sequence is None:
            return self.engine.ready_slots(layer, wanted)
        return _receive_experts(sequence, layer, wanted, is_grouped=True)

    def look_up(self, layer: int, experts_TK: Tensor) -> SlotTable | None:
        table = self.engine.look_up(layer, experts_TK)
        if table is not None:  # no sequence waits for others
            self._read_next_dense(layer)
        return table

    def pin(self, layer: int, expert: int) -> ExpertWeights:
        sequence = self._suspendable()
        if sequence is None or self._pinned == (layer, expert):
            return self.engine.pin(layer, expert)
        request = Yield(SyncPoint.EXPERTS, layer, {expert}, is_loop=True)
        return yield_until_resumed(sequence, request)

    # ---- called by the group

    def run_to_forward_pass(self, sequence: SequenceTask, value: object = None) -> None:
        """Run what lies between two forward passes of a sequence; `value` is what it waits for."""
        with self._lane(sequence):
            sequence.resume(value)

    def fail(self, sequences: Sequence[SequenceTask], error: Exception) -> None:
        """Raise in sequences why their forward pass, or their experts, failed."""
        self._is_complete = False
        for sequence in sequences:
            with self._lane(sequence):
                sequence.throw(error)

    def run_forward_pass(self, sequences: Sequence[SequenceTask]) -> None:
        """Run one forward pass of all the sequences, from its first layer to its end."""
        requests = [sequence.pending for sequence in sequences if sequence.pending is not None]
        self._running, self._is_complete = list(sequences), True
        self._routed_layers.clear()
        try:
            self.engine.begin_step(
                np.concatenate([request.tokens_T for request in requests]),
                np.concatenate([request.requests_T for request in requests]),
            )
            for sequence in sequences:
                sequence.captured.clear()
                self._resume(sequence)
            while inside := [s for s in sequences if s.is_inside_forward_pass]:
                self._advance_earliest(inside)
        finally:
            try:
                self.engine.end_step()
            finally:
                self._running = []

    @contextmanager
    def _lane(self, sequence: SequenceTask) -> Iterator[None]:
        """Count forward passes that begin within the context as the sequence's."""
        outer = self._probes.lane
        self._probes.lane = sequence.lane
        try:
            yield
        finally:
            self._probes.lane = outer

    def _resume(
        self, sequence: SequenceTask, value: object = None, *, pinned: tuple[int, int] | None = None
    ) -> None:
        self._pinned = pinned
        with self._lane(sequence):
            sequence.resume(value)
        self._pinned = None
        self._is_complete &= not sequence.is_done

    def _advance_earliest(self, inside: Sequence[SequenceTask]) -> None:
        """Resume the sequences that are furthest behind."""
        layer, point = min((s.pending.layer, s.pending.point) for s in inside if s.pending)
        here = [sequence for sequence in inside if sequence.is_at(layer, point)]
        if point is SyncPoint.EXPERTS:
            self._send_routed(layer, here)
            loops = [s for s in here if s.pending is not None and s.pending.is_loop]
            if loops:
                self._pin_next(layer, loops)
            else:
                self._distribute(layer, here)
            return
        if point is SyncPoint.INPUT:
            self._send_layer_input(layer, here)
        for sequence in here:
            self._resume(sequence)

    # ---- events for the engine

    def _send_layer_input(self, layer: int, here: Sequence[SequenceTask]) -> None:
        if self._is_whole_step(here):
            hidden = _concatenate([sequence.captured[layer].hidden_TD for sequence in here])
            assert hidden is not None
            self.engine.layer_input(layer, hidden)

    def _send_routed(self, layer: int, here: Sequence[SequenceTask]) -> None:
        if layer in self._routed_layers or not self._is_whole_step(here):
            return
        captured = [sequence.captured.get(layer, CapturedSignals()) for sequence in here]
        gate_TD = _concatenate([signals.gate_TD for signals in captured])
        if gate_TD is not None:
            self.engine.gate_input(layer, gate_TD)
        experts_TK = _concatenate([signals.experts_TK for signals in captured])
        if experts_TK is not None:
            logits_TE = _concatenate([signals.logits_TE for signals in captured])
            self.engine.routed(layer, experts_TK, logits_TE, None)
        self._read_next_dense(layer)
        self._routed_layers.add(layer)

    def _read_next_dense(self, layer: int) -> None:
        """Read the next layer's attention while experts compute (Klotski, algorithm 1)."""
        if self._dense_stream is not None:
            self._dense_stream.on_routed(layer)

    def _is_whole_step(self, here: Sequence[SequenceTask]) -> bool:
        """True if `here` are all sequences of the step: arrays have a row for each token."""
        return self._is_complete and len(here) == len(self._running)

    # ---- experts for the sequences

    def _distribute(self, layer: int, here: Sequence[SequenceTask]) -> None:
        """Give each expert once, when it is ready, to all sequences that need it."""
        while waiting := [s for s in here if s.is_at(layer, SyncPoint.EXPERTS)]:
            wanted = sorted({expert for sequence in waiting for expert in sequence.wanted})
            if not wanted:
                for sequence in waiting:
                    self._resume(sequence)
                return
            try:
                for delivery in self._deliver(layer, wanted, waiting[0]):
                    for sequence in waiting:
                        own = {e: what for e, what in delivery.items() if e in sequence.wanted}
                        if own and sequence.is_at(layer, SyncPoint.EXPERTS):
                            self._resume(sequence, own)
            except Exception as error:
                if not ends_sequences_only(error):
                    raise
                failed = self.engine.failed_experts(layer)
                left = [s for s in waiting if s.is_at(layer, SyncPoint.EXPERTS)]
                # Sequences that need none of the failed experts request theirs again.
                self.fail([s for s in left if failed.intersection(s.wanted)] or left, error)

    def _deliver(
        self, layer: int, wanted: list[int], sequence: SequenceTask
    ) -> Iterator[dict[int, Any]]:
        """Yield what the sequences compute with, by expert: slots or parameters."""
        if sequence.pending is not None and sequence.pending.is_grouped:
            return self.engine.ready_slots(layer, wanted)
        return self.engine.ready(layer, wanted)

    def _pin_next(self, layer: int, loops: Sequence[SequenceTask]) -> None:
        """Pin the lowest requested expert for the sequences whose own loops have reached it."""
        expert = min(min(sequence.wanted) for sequence in loops)
        there = [sequence for sequence in loops if sequence.wanted == {expert}]
        try:
            weights = self.engine.pin(layer, expert)
        except Exception as error:
            if not ends_sequences_only(error):
                raise
            self.fail(there, error)
            return
        for sequence in there:
            self._resume(sequence, weights, pinned=(layer, expert))


def ends_sequences_only(error: Exception) -> bool:
    """Return whether an error of experts leaves the engine as it should be."""
    return isinstance(error, MoecastError) or is_out_of_memory(error)


def _receive_experts(
    sequence: SequenceTask, layer: int, wanted: Sequence[int], *, is_grouped: bool = False
) -> Iterator[dict[int, Any]]:
    """Yield the wanted experts in the order in which the scheduler distributes them."""
    missing = set(wanted)
    request = Yield(SyncPoint.EXPERTS, layer, missing, is_grouped=is_grouped)
    received = yield_until_resumed(sequence, request)
    while missing:
        yield received
        missing.difference_update(received)
        # Synchronise after the layer: otherwise links would idle while one sequence runs ahead.
        point = SyncPoint.EXPERTS if missing else SyncPoint.LAYER_DONE
        request = Yield(point, layer, missing, is_grouped=is_grouped)
        received = yield_until_resumed(sequence, request)


def _drop_spare_rows(array: Array) -> Array:
    """Return the rows of the calling sequence's tokens."""
    sequence = current_sequence()
    return array if sequence is None else array[: sequence.num_rows]


def _concatenate(arrays: Sequence[Array | None]) -> Array | None:
    """Return the rows of all arrays, or None if one is missing."""
    present = [array for array in arrays if array is not None]
    return np.concatenate(present) if len(present) == len(arrays) else None
