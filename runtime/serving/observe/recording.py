"""Appends the prompts of a sample of requests to a file, as token ids; no text and no answer.

    {"tokens": [791, 3778, ...]}

`moecast collect data=jsonl data.path=FILE` records from it what predictors learn from.
"""

import errno
import json
import logging
import os
import random
import stat
from contextlib import suppress
from pathlib import Path

from predictors.errors import MoecastError
from predictors.files import expand_home
from runtime.policy.budget import parse_size
from runtime.serving.choice import CompletionChoice, FinishReason
from runtime.serving.config import ServeConfig
from runtime.serving.service import ServiceObserver

log = logging.getLogger(__name__)


class PromptRecorder(ServiceObserver):
    """Appends a line for each drawn request that was answered to its end.

    The file is opened for each line: after `mv` the next one begins another file. A write that
    fails ends the recording with one warning, and harms no request.

    Args:
        fraction: share of the answers whose prompts are recorded.
        max_bytes: size of the file at which the recording pauses.

    Raises:
        MoecastError: the file cannot be written.
    """

    def __init__(self, path: Path, *, fraction: float, max_bytes: int):
        self.path = path
        self._fraction, self._max_bytes = fraction, max_bytes
        self.is_active = True
        """False from the first failed write on."""
        self.num_requests = 0
        self._is_full = False
        try:
            self._append(b"")
        except OSError as error:
            raise MoecastError(
                f"record={path} cannot be written ({error.strerror or error}): name another file"
            ) from error

    def on_ended(self, choice: CompletionChoice) -> None:
        is_complete = choice.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)
        if not (self.is_active and is_complete) or random.random() >= self._fraction:
            return
        line = json.dumps({"tokens": choice.prompt}, separators=(",", ":")) + "\n"
        try:
            self.num_requests += self._append(line.encode())
        except OSError as error:
            self.is_active = False
            log.warning("recording into %s has ended (%s); serving goes on", self.path, error)

    def _append(self, line: bytes) -> bool:
        """Write a line at the end; False if the file has its size."""
        # Not to be opened through a link, and without waiting for the reader of a pipe.
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
        descriptor = os.open(self.path, flags, 0o600)
        try:
            found = os.fstat(descriptor)
            if not stat.S_ISREG(found.st_mode):
                raise OSError("it is not a regular file")
            was_full, self._is_full = self._is_full, found.st_size + len(line) > self._max_bytes
            if self._is_full:
                if not was_full:
                    log.warning("recording pauses: %s has record_bytes; move it away", self.path)
                return False
            if not found.st_size:
                os.fchmod(descriptor, 0o600)
            elif line and os.pread(descriptor, 1, found.st_size - 1) != b"\n":
                line = b"\n" + line
            if os.write(descriptor, line) < len(line):
                # A disk that is nearly full takes a part, of which nothing is to remain.
                with suppress(OSError):
                    os.ftruncate(descriptor, found.st_size)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return True
        finally:
            os.close(descriptor)

    def status(self) -> dict[str, bool | int]:
        """The recording in `/status` and in the command's results."""
        return {"is_active": self.is_active, "num_requests": self.num_requests}


def open_recorder(config: ServeConfig) -> PromptRecorder | None:
    """The recorder that the configuration asks for; raises MoecastError as it does."""
    if config.record is None:
        return None
    return PromptRecorder(
        expand_home(config.record),
        fraction=config.record_fraction,
        max_bytes=parse_size(config.record_bytes, name="record_bytes"),
    )
