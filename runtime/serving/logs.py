"""The server's log: one JSON object a line, in which no key stands.

    {"time": "2026-01-31T12:00:00.123Z", "level": "info", "logger": "...", "event": "request", ...}

Whatever any library logs becomes such a line. What a line says beside its event is given as
`log.info("request", extra={"fields": {"request_id": ..., "status": 200}})`.
"""

import json
import logging
import sys
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Any, TextIO

HIDDEN = "***"
"""Stands where a key would."""
OWN_HANDLERS = ("uvicorn", "uvicorn.error", "uvicorn.access", "transformers")
"""Loggers that may have come with handlers of their own, which do not write JSON."""


class JsonLines(logging.Formatter):
    """A record as one line of JSON.

    Args:
        secrets: texts that are told by no line, whoever logs them.
    """

    def __init__(self, *, secrets: Iterable[str] = ()):
        super().__init__()
        # The longest first: a key may begin as another one does.
        self._secrets = sorted(filter(None, secrets), key=len, reverse=True)

    def format(self, record: logging.LogRecord) -> str:
        """`event` is the message, `error` an exception's traceback.

        Fields that are None are left out.
        """
        said: dict[str, Any] = {
            "time": moment(record.created),
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            said["error"] = self.formatException(record.exc_info)
        told = {name: value for name, value in said.items() if value is not None}
        # ASCII: other line breaks of Unicode, and halves of characters, break no reader.
        return json.dumps(self._without_secrets(told), default=str)

    def _without_secrets(self, value: Any) -> Any:
        if not self._secrets or value is None or isinstance(value, bool | int | float):
            return value
        if isinstance(value, Mapping):
            return {self._without_secrets(k): self._without_secrets(v) for k, v in value.items()}
        if isinstance(value, list | tuple | set | frozenset):
            return [self._without_secrets(one) for one in value]
        text = str(value)
        for secret in self._secrets:
            text = text.replace(secret, HIDDEN)
        return text


def moment(seconds: float) -> str:
    """Of seconds since 1970: UTC, to the millisecond."""
    text = datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")
    return text.replace("+00:00", "Z")


def log_as_json(
    *, secrets: Iterable[str] = (), level: int = logging.INFO, stream: TextIO | None = None
) -> logging.Handler:
    """From now on everything that is logged in this process goes to `stream` (stderr) as JSON, and
    nowhere else; returns the handler.
    """
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonLines(secrets=secrets))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level)
    for name in OWN_HANDLERS:
        own = logging.getLogger(name)
        own.handlers.clear()
        own.propagate = True
    return handler
