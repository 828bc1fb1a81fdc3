"""The server's log: one JSON object per line, without API keys.

    {"time": "2026-01-31T12:00:00.123Z", "level": "info", "logger": "...", "event": "request", ...}

Records of libraries become such lines too. Further fields are passed as
`log.info("request", extra={"fields": {"request_id": ..., "status": 200}})`.
"""

import io
import json
import logging
import sys
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Any, TextIO

from runtime.serving.log_queue import QueuedHandler

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


def configure_json_logging(
    *, secrets: Iterable[str] = (), stream: TextIO | None = None
) -> logging.Handler:
    """Send all log records and warnings of this process to `stream` (stderr) as JSON lines.

    Lines that a file or pipe does not take in time are dropped and counted: nothing waits for the
    reader of the log. Returns the handler.
    """
    handler = make_handler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter(secrets=secrets))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.INFO)
    logging.captureWarnings(True)
    for name in LIBRARY_LOGGERS:
        logger = logging.getLogger(name)
        logger.handlers.clear()
        logger.propagate = True
    return handler


def make_handler(stream: TextIO) -> logging.Handler:
    """A handler that waits for nobody; streams in memory are written at once."""
    try:
        descriptor = stream.fileno()
    except io.UnsupportedOperation:
        return logging.StreamHandler(stream)
    return QueuedHandler(descriptor)
