"""Writes recorded requests on a separate thread, within bounds of memory and of disk."""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from collect.errors import TraceError
from collect.traces.growing import GrowingTrace, ServedRequest
from collect.traces.layout import TOKEN_DTYPES
from runtime.serving.recording import RecordingCounts

log = logging.getLogger(__name__)

MEMORY_BYTES = 512 << 20
"""Most memory for rows that are not on the disk yet; a request that finds none is not recorded."""
SHARD_BYTES = 64 << 20
"""Memory of rows that are written together; few at a time would make a trace of many files."""
SHARD_SECONDS = 60.0
"""Time after which fewer are written: what a kill may lose."""
COLUMN_BYTES, REQUEST_BYTES = 512, 512
"""Allowances for the head of a shard, by column, and for a request in its list."""
TOKEN_BYTES = sum(dtype.itemsize for dtype in TOKEN_DTYPES.values())


@dataclass(frozen=True)
class FinishedRequest:
    """A request whose rows are complete."""

    round: Callable[[], ServedRequest]
    """Returns the rows as they are stored; raises TraceError if a value cannot be stored."""
    reserved_bytes: int
    """Memory that was set aside for it."""


class TraceThread:
    """Takes requests, and adds them to a trace on another thread.

    A request reserves its memory before it begins (`reserve`) and ends with `finish` or `cancel`.
    Nothing of a request is written unless all of it is. What goes wrong with the disk or the trace
    ends the recording with one line of the log, and nothing else.

    Args:
        max_bytes: size of the trace at which no more is recorded.
    """

    def __init__(
        self,
        trace: GrowingTrace,
        *,
        max_bytes: int,
        memory_bytes: int = MEMORY_BYTES,
        shard_bytes: int = SHARD_BYTES,
        shard_seconds: float = SHARD_SECONDS,
    ):
        self._trace = trace
        self._max_bytes = max_bytes
        self._memory_bytes = memory_bytes
        self._shard_bytes = min(shard_bytes, memory_bytes // 4)
        self._shard_seconds = shard_seconds
        self._condition = threading.Condition()
        self._finished: deque[FinishedRequest] = deque()
        self._reserved_bytes = 0
        self._is_full = False
        """The next request would exceed `max_bytes`."""
        self._has_failed = False
        self._has_overflown = False
        """A value was too large for half precision; only the first is worth a warning."""
        self._is_closing = False
        self._num_requests = self._num_tokens = self._num_dropped = 0
        self._num_bytes = trace.num_bytes
        self._thread = threading.Thread(target=self._run, name="recorder", daemon=True)
        self._thread.start()

    # ---- called by the engine thread

    def reserve(self, num_bytes: int) -> bool:
        """Sets memory aside for a request; False if it cannot be recorded, which is counted."""
        with self._condition:
            self._is_full = self._is_full and not self._trace.is_moved()
            has_room = self._reserved_bytes + num_bytes <= self._memory_bytes
            if self._has_failed or self._is_closing or self._is_full or not has_room:
                self._num_dropped += 1
                return False
            self._reserved_bytes += num_bytes
            return True

    def finish(self, round_rows: Callable[[], ServedRequest], *, reserved_bytes: int) -> None:
        """Hands over a request, whose rows are rounded on the thread."""
        with self._condition:
            if self._has_failed:
                # It began before the recording ended.
                self._reserved_bytes -= reserved_bytes
                self._num_dropped += 1
                return
            self._finished.append(FinishedRequest(round_rows, reserved_bytes))
            self._condition.notify_all()

    def cancel(self, reserved_bytes: int) -> None:
        """Gives the memory of a request back that ended without all of its rows."""
        with self._condition:
            self._reserved_bytes -= reserved_bytes

    def fail(self, error: Exception) -> None:
        """Ends the recording, with one line of the log."""
        with self._condition:
            if self._has_failed:
                return
            self._has_failed = True
            self._num_dropped += len(self._finished)
            self._finished.clear()
        log.warning(
            "recording requests into %s has ended (%s); serving goes on", self._trace.folder, error
        )

    def counts(self) -> RecordingCounts:
        with self._condition:
            return RecordingCounts(
                is_active=not (self._has_failed or self._is_full or self._is_closing),
                num_requests=self._num_requests,
                num_tokens=self._num_tokens,
                num_dropped=self._num_dropped,
                num_bytes=self._num_bytes,
            )

    def close(self, *, timeout_seconds: float | None = None) -> None:
        """Writes what is finished, and ends the thread. May be called twice."""
        with self._condition:
            self._is_closing = True
            self._condition.notify_all()
        self._thread.join(timeout_seconds)

    # ---- the thread

    def _run(self) -> None:
        try:
            while requests := self._wait_for_shard():
                try:
                    self._write(requests)
                except (OSError, TraceError) as error:
                    with self._condition:
                        self._num_dropped += len(requests)
                    self.fail(error)
                finally:
                    with self._condition:
                        self._reserved_bytes -= sum(request.reserved_bytes for request in requests)
        finally:
            self._trace.close()

    def _wait_for_shard(self) -> list[FinishedRequest]:
        """Returns requests that are to be written together; none when the recording has ended."""
        due = None
        with self._condition:
            while not self._is_closing:
                if self._finished and due is None:
                    due = time.monotonic() + self._shard_seconds
                waiting = sum(request.reserved_bytes for request in self._finished)
                left = None if due is None else due - time.monotonic()
                if waiting >= self._shard_bytes or (left is not None and left <= 0):
                    break
                self._condition.wait(left)
            requests = list(self._finished)
            self._finished.clear()
            return requests

    def _write(self, requests: list[FinishedRequest]) -> None:
        rounded = [rows for rows in map(self._round, requests) if rows is not None]
        fitting = self._choose_fitting(rounded)
        if fitting:
            self._trace.add(fitting)
        with self._condition:
            self._num_requests += len(fitting)
            self._num_tokens += sum(request.num_rows for request in fitting)
            self._num_dropped += len(requests) - len(fitting)
            self._num_bytes = self._trace.num_bytes
            self._is_full = len(fitting) < len(rounded)
        if self._is_full:
            log.warning(
                "%s has reached %s bytes, and requests are no longer recorded; move the folder "
                "away to begin another trace there",
                self._trace.folder,
                f"{self._max_bytes:,}",
            )

    def _round(self, request: FinishedRequest) -> ServedRequest | None:
        """Returns a request as it is stored; None if half precision cannot hold a value of it."""
        try:
            return request.round()
        except TraceError as error:
            level = logging.DEBUG if self._has_overflown else logging.WARNING
            log.log(level, "a request was not recorded: %s", error)
            self._has_overflown = True
            return None

    def _choose_fitting(self, requests: list[ServedRequest]) -> list[ServedRequest]:
        """Returns the first requests that fit into the trace's size."""
        if self._trace.is_moved():
            self._trace.reopen()
        if not requests:
            return requests
        size = self._trace.num_bytes + COLUMN_BYTES * (4 + len(requests[0].columns))
        for count, request in enumerate(requests):
            size += REQUEST_BYTES + request.num_rows * TOKEN_BYTES
            size += sum(values.nbytes for values in request.columns.values())
            if size > self._max_bytes:
                return requests[:count]
        return requests
