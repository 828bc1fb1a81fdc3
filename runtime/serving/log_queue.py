"""Log handler that never blocks: a thread writes the lines, and lines beyond the queue are dropped.

A pipe that nobody reads takes 64 KiB. Handlers of `logging` would then wait in the event loop, and
the server would answer nobody, signals included.
"""

import logging
import os
import select
import threading
import time
from collections import deque

MAX_QUEUED_BYTES = 4 << 20
"""Most bytes of lines that wait to be written."""
WRITE_BYTES = 4096
"""POSIX's PIPE_BUF on Linux: a pipe that is ready takes as many without waiting."""
POLL_SECONDS = 0.2
"""Time between two looks at whether the handler has been closed while nobody reads."""
END_SECONDS = 1.0
"""Time at the end of the process for the last lines."""


class QueuedHandler(logging.Handler):
    """Writes formatted records to a file descriptor on a thread, in order; counts dropped ones.

    Python's own file objects are not used: a thread that is blocked in a write holds their lock.
    """

    def __init__(self, descriptor: int, *, max_bytes: int = MAX_QUEUED_BYTES):
        super().__init__()
        self._descriptor = descriptor
        self._max_bytes = max_bytes
        self._lines: deque[bytes] = deque()
        self._num_bytes = 0
        """Bytes of the queued lines and of the one that is being written."""
        self._changed = threading.Condition()
        self._is_closed = False
        self.num_dropped = 0
        """Lines that were dropped: the queue was full, or a write failed."""
        self._num_reported = 0
        self._thread = threading.Thread(target=self._write_all, name="log", daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        """Queue the record's line, or drop it and count it."""
        try:
            line = self._encode(record)
        except Exception as error:
            # What a record refers to may fail to become text; what logs it must go on.
            line = self._encode(
                own_record("a record has no text", of=record.name, cause=type(error).__name__)
            )
        with self._changed:
            if self._is_closed or self._num_bytes + len(line) > self._max_bytes:
                self.num_dropped += 1
                return
            self._lines.append(line)
            self._num_bytes += len(line)
            self._changed.notify_all()

    def _encode(self, record: logging.LogRecord) -> bytes:
        return (self.format(record) + "\n").encode("utf-8", "backslashreplace")

    def flush(self) -> None:
        """Wait until all lines are written, for `END_SECONDS` at most."""
        with self._changed:
            self._changed.wait_for(lambda: not self._num_bytes, END_SECONDS)

    def close(self) -> None:
        """End the thread; lines that are still queued are lost."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._thread.join(2 * POLL_SECONDS)
        super().close()

    # ---- the thread

    def _write_all(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._lines or self._is_closed)
                if self._is_closed:
                    return
                line = self._lines.popleft()
                num_dropped = self.num_dropped - self._num_reported
            if num_dropped:
                report = self._encode(
                    own_record("lines of the log were dropped", dropped=num_dropped)
                )
                if self._write(report):
                    self._num_reported += num_dropped
            is_written = self._write(line)
            with self._changed:
                self.num_dropped += not is_written
                self._num_bytes -= len(line)
                self._changed.notify_all()

    def _write(self, line: bytes) -> bool:
        """Write one line; False if that failed or the handler was closed."""
        start = 0
        while start < len(line):
            try:
                _, ready, _ = select.select([], [self._descriptor], [], POLL_SECONDS)
                if self._is_closed:
                    return False
                if ready:
                    start += os.write(self._descriptor, line[start : start + WRITE_BYTES])
            except BlockingIOError:
                continue  # another process shares the pipe and was faster
            except (OSError, ValueError):
                # The reader has gone, the disk is full, or the descriptor is closed. The pause
                # keeps one that always fails from taking the processor.
                time.sleep(POLL_SECONDS / 10)
                return False
        return True


def own_record(event: str, **fields: object) -> logging.LogRecord:
    """A warning of this module."""
    record = logging.LogRecord(__name__, logging.WARNING, __file__, 0, event, None, None)
    record.fields = fields
    return record


def count_dropped_lines() -> int:
    """Lines that the process's log has dropped."""
    handlers = logging.getLogger().handlers
    return sum(handler.num_dropped for handler in handlers if isinstance(handler, QueuedHandler))
