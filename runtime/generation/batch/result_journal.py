"""The results file: one line per finished prompt; a killed run loses and repeats nothing.

Each line is appended by one write. A kill can leave a partial last line, which the next run
truncates and computes again. `OUTPUT.settings.json` next to the file records the input and the
settings; a run with others is refused.
"""

import fcntl
import json
import os
import stat
import time
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from predictors.files import write_json
from runtime.errors import ResultFileError
from runtime.generation.batch.prompts import PromptId

FORMAT = 1
SYNC_SECONDS = 1.0
"""Seconds between two fsyncs: what a power cut may lose. A killed process loses nothing."""
KEYS = {"id", "text", "tokens", "finish_reason"}


@dataclass(frozen=True)
class BatchResult:
    """The continuation of one prompt."""

    id: PromptId
    text: str | None
    """None: the model has no tokenizer."""
    tokens: list[int]
    """New tokens, including the one that ended it."""
    finish_reason: str
    """stop: an end-of-text token; length: `max_new_tokens`."""


class ResultJournal:
    """Appends results; a context manager. The file is locked: one process at a time.

    Args:
        settings: everything that results depend on, as plain values.
        known: ids of the input.

    Raises:
        ResultFileError: existing results have another input or other settings, are damaged, or
            are being written by another process; or the file cannot be written.
    """

    def __init__(
        self,
        path: Path,
        settings: Mapping[str, Any],
        *,
        known: Collection[PromptId],
        overwrite: bool = False,
    ):
        self.path = path
        self._synced = time.monotonic()
        # A JSON round trip makes it comparable with the stored settings.
        self._settings = json.loads(json.dumps({"format": FORMAT, **settings}))
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        except OSError as error:
            raise ResultFileError(f"output={path}: {error.strerror}; give another file") from error
        try:
            if not stat.S_ISREG(os.fstat(self._handle).st_mode):
                raise ResultFileError(f"output={path} is not a regular file; give another path")
            try:
                fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise ResultFileError(
                    f"output={path}: another process is writing it; wait, or give another file"
                ) from error
            if overwrite:
                os.ftruncate(self._handle, 0)
                self.settings_path.unlink(missing_ok=True)
            self.done = self._continue(frozenset(known))
        except BaseException:
            os.close(self._handle)
            raise

    @property
    def settings_path(self) -> Path:
        return self.path.with_name(f"{self.path.name}.settings.json")

    def _continue(self, known: frozenset[PromptId]) -> dict[PromptId, None]:
        """Return the ids that have a result, in the file's order."""
        raw = self.path.read_bytes()
        if not self.settings_path.is_file():
            if raw:
                raise ResultFileError(
                    f"output={self.path} is not empty and has no {self.settings_path.name}; give "
                    "another file, or overwrite=true to delete its content"
                )
            # Written before the first result, so that no result exists without settings.
            write_json(self.settings_path, self._settings)
            return {}
        there = json.loads(self.settings_path.read_bytes())
        for key in sorted({*there, *self._settings}):
            if there.get(key) != self._settings.get(key):
                raise ResultFileError(
                    f"output={self.path} holds results of another run: {key} was "
                    f"{there.get(key)!r} and is {self._settings.get(key)!r}; give another output, "
                    "the settings of that run, or overwrite=true to delete its results"
                )
        done: dict[PromptId, None] = {}
        length = place = 0
        is_torn = False
        for number, line in enumerate(raw.split(b"\n")[:-1], start=1):
            own, place = _parse_id(line), place + len(line) + 1
            if own is None:
                # A power cut can leave several partial lines at the end, none before a whole one.
                is_torn = True
            elif is_torn or own not in known or own in done:
                raise ResultFileError(
                    f"output={self.path}, line {number}: id {own!r} is not of the input, appears "
                    "twice, or follows a damaged line: another program wrote it; give another "
                    "file, or start again with overwrite=true"
                )
            else:
                done[own], length = None, place
        if length < len(raw):
            os.ftruncate(self._handle, length)
            os.fsync(self._handle)
        return done

    def append(self, result: BatchResult) -> None:
        """Append one line.

        Raises:
            ResultFileError: the line cannot be written; a partial line is truncated.
        """
        assert result.id not in self.done, result.id
        line = (json.dumps(asdict(result), ensure_ascii=False) + "\n").encode()
        size = os.fstat(self._handle).st_size
        try:
            while line:
                line = line[os.write(self._handle, line) :]
        except OSError as error:
            os.ftruncate(self._handle, size)
            raise ResultFileError(
                f"output={self.path}: {error.strerror}; free space and run the same "
                "command again to resume"
            ) from error
        self.done[result.id] = None
        if time.monotonic() - self._synced >= SYNC_SECONDS:
            os.fsync(self._handle)
            self._synced = time.monotonic()

    def close(self) -> None:
        """Flush the results and unlock the file."""
        os.fsync(self._handle)
        os.close(self._handle)

    def __enter__(self) -> "ResultJournal":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _parse_id(line: bytes) -> PromptId | None:
    """Return the id of a complete result, else None."""
    try:
        answer = json.loads(line)
    except ValueError:
        return None
    if not isinstance(answer, dict) or set(answer) != KEYS:
        return None
    own = answer["id"]
    return own if isinstance(own, str | int) else None
