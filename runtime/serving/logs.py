"""The server's log: one JSON object per line, without API keys.

    {"time": "2026-01-31T12:00:00.123Z", "level": "info", "logger": "...", "event": "request", ...}

Records of libraries become such lines too. Further fields are passed as
`log.info("request", extra={"fields": {"request_id": ..., "status": 200}})`.
"""

import io
import json
import logging
import queue
from collections import deque
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from logging.handlers import QueueHandler, QueueListener
from typing import Any

STDERR = 2
"""Its descriptor, also where `sys.stderr` was replaced by a text in memory."""
MAX_QUEUED_CHARS = 4 << 20
"""Most characters of lines that wait to be written."""
END_SECONDS = 1.0
"""Time at the end of the process for the last lines."""
REDACTED = "***"
"""Replaces keys."""
LIBRARY_LOGGERS = ("uvicorn", "uvicorn.error", "uvicorn.access", "transformers")
"""Loggers that may have their own handlers, which do not write JSON."""


class JsonFormatter(logging.Formatter):
    """Formats a record as one line of JSON.

    Args:
        secrets: texts to redact in every line.
    """

    def __init__(self, *, secrets: Iterable[str] = ()):
        super().__init__()
        # The longest first: one key may be the beginning of another.
        self._secrets = sorted(filter(None, secrets), key=len, reverse=True)

    def format(self, record: logging.LogRecord) -> str:
        """`event` is the message, `error` an exception's traceback.

        Fields that are None are left out.
        """
        fields: dict[str, Any] = {
            "time": utc_timestamp(record.created),
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            fields["error"] = self.formatException(record.exc_info)
        fields = {name: value for name, value in fields.items() if value is not None}
        # ASCII: Unicode's other line breaks and lone surrogates would break readers.
        return json.dumps(self._redact(fields), default=str)

    def _redact(self, value: Any) -> Any:
        if not self._secrets or value is None or isinstance(value, bool | int | float):
            return value
        if isinstance(value, Mapping):
            return {self._redact(name): self._redact(item) for name, item in value.items()}
        if isinstance(value, list | tuple | set | frozenset):
            return [self._redact(item) for item in value]
        text = str(value)
        for secret in self._secrets:
            text = text.replace(secret, REDACTED)
        return text


def utc_timestamp(seconds: float) -> str:
    """Format seconds since 1970 as UTC, to the millisecond."""
    text = datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")
    return text.replace("+00:00", "Z")


def configure_json_logging(handler: logging.Handler, *, secrets: Iterable[str] = ()) -> None:
    """Send all log records and warnings of this process to the handler as JSON lines."""
    handler.setFormatter(JsonFormatter(secrets=secrets))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.INFO)
    logging.captureWarnings(True)
    for name in LIBRARY_LOGGERS:
        logger = logging.getLogger(name)
        logger.handlers.clear()
        logger.propagate = True


class LineQueue(queue.Queue[logging.LogRecord | None]):
    """A queue whose size is that of its lines."""

    def _init(self, maxsize: int) -> None:  # noqa: ARG002
        self._lines: deque[logging.LogRecord | None] = deque()
        self._num_chars = 0

    def _qsize(self) -> int:
        return self._num_chars

    def _put(self, item: logging.LogRecord | None) -> None:
        self._lines.append(item)
        self._num_chars += line_size(item)

    def _get(self) -> logging.LogRecord | None:
        item = self._lines.popleft()
        self._num_chars -= line_size(item)
        return item


def line_size(record: logging.LogRecord | None) -> int:
    """Size of a record that is a line already; None ends the thread that writes."""
    return 1 if record is None else max(1, len(record.msg))


class DroppingHandler(QueueHandler):
    """Writes records on a thread; those beyond the queue are dropped and counted.

    A pipe that nobody reads takes 64 KiB. Handlers of `logging` would then wait in the event loop,
    and the server would answer nobody, signals included.
    """

    queue: LineQueue

    def __init__(self, descriptor: int, *, max_chars: int = MAX_QUEUED_CHARS):
        super().__init__(LineQueue(max_chars))
        self.num_dropped = 0
        # Without Python's own buffer and without a lock: a thread that is blocked in a write would
        # keep them from the end of the process.
        raw = io.FileIO(descriptor, "w", closefd=False)
        stream = io.TextIOWrapper(raw, "utf-8", "backslashreplace", write_through=True)
        writer = logging.StreamHandler(stream)
        writer.lock = None
        QueueListener(self.queue, writer).start()

    def enqueue(self, record: logging.LogRecord) -> None:
        try:
            self.queue.put_nowait(record)
        except queue.Full:
            self.num_dropped += 1

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: ARG002
        """A part of a record may fail to become text; what logs it must go on."""
        self.num_dropped += 1

    def flush(self) -> None:
        """Wait until all lines are written, for `END_SECONDS` at most."""
        with self.queue.all_tasks_done:
            self.queue.all_tasks_done.wait_for(lambda: not self.queue.unfinished_tasks, END_SECONDS)


def count_dropped_lines() -> int:
    """Lines that the process's log has dropped."""
    handlers = logging.getLogger().handlers
    return sum(handler.num_dropped for handler in handlers if isinstance(handler, DroppingHandler))
