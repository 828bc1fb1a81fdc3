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

from predictors.files import sync_folder, write_json
from runtime.errors import ResultFileError
from runtime.generation.batch.prompts import PromptId, is_integer
from runtime.generation.config import Fsync

FORMAT = 1
SYNC_SECONDS = 1.0
"""Seconds between two fsyncs with `fsync=second`."""
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
        fsync: Fsync = Fsync.SECOND,
        overwrite: bool = False,
    ):
        self.path = path
        self._fsync = fsync
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
            self.done: dict[PromptId, None] = self._continue(known)
        except BaseException:
            os.close(self._handle)
            raise

    @property
    def settings_path(self) -> Path:
        return self.path.with_name(f"{self.path.name}.settings.json")

    def _continue(self, known: Collection[PromptId]) -> dict[PromptId, None]:
        raw = self.path.read_bytes()
        if not self.settings_path.is_file():
            if raw:
                raise ResultFileError(
                    f"output={self.path} is not empty and has no {self.settings_path.name}; give "
                    "another file, or overwrite=true to delete its content"
                )
            # Written before the first result, so that no result exists without settings.
            write_json(self.settings_path, self._settings)
            sync_folder(self.path.parent)
            return {}
        self._same_settings()
        done, length = self._whole(raw, known)
        if length < len(raw):
            os.ftruncate(self._handle, length)
            os.fsync(self._handle)
        return done

    def _same_settings(self) -> None:
        try:
            there = json.loads(self.settings_path.read_bytes())
        except ValueError as error:
            raise ResultFileError(
                f"{self.settings_path} is damaged ({error}); start again with overwrite=true"
            ) from error
        for key in sorted({*there, *self._settings}):
            if there.get(key) != self._settings.get(key):
                raise ResultFileError(
                    f"output={self.path} holds results of another run: {key} was "
                    f"{there.get(key)!r} and is {self._settings.get(key)!r}; give another output, "
                    "the settings of that run, or overwrite=true to delete its results"
                )

    def _whole(self, raw: bytes, known: Collection[PromptId]) -> tuple[dict[PromptId, None], int]:
        """Return the ids of the complete lines and the bytes that these take.

        A power cut can leave several partial lines at the end, but none before a complete one.
        """
        done: dict[PromptId, None] = {}
        length = position = 0
        torn: int | None = None
        for number, line in enumerate(raw.split(b"\n")[:-1], start=1):
            position += len(line) + 1
            answer_id = _parse_id(line)
            if answer_id is None:
                torn = torn or number
                continue
            if torn is not None:
                raise ResultFileError(
                    f"output={self.path}, line {torn}: damaged, and complete results follow; give "
                    "another file, or start again with overwrite=true"
                )
            if answer_id not in known or answer_id in done:
                fault = "appears twice" if answer_id in done else "is not an id of the input"
                raise ResultFileError(
                    f"output={self.path}, line {number}: id {answer_id!r} {fault}: another program "
                    "wrote it; give another file, or start again with overwrite=true"
                )
            done[answer_id] = None
            length = position
        return done, length

    def append(self, result: BatchResult) -> None:
        """Append one line.

        Raises:
            ResultFileError: the line cannot be written; a partial line is truncated.
        """
        assert result.id not in self.done, result.id
        line = _line(result)
        size = os.fstat(self._handle).st_size
        try:
            written = os.write(self._handle, line)
            while written < len(line):
                written += os.write(self._handle, line[written:])
        except OSError as error:
            os.ftruncate(self._handle, size)
            raise ResultFileError(
                f"output={self.path}: {error.strerror}; free space and run the same "
                "command again to resume"
            ) from error
        self.done[result.id] = None
        now = time.monotonic()
        if self._fsync is Fsync.EACH or (
            self._fsync is Fsync.SECOND and now - self._synced >= SYNC_SECONDS
        ):
            os.fsync(self._handle)
            self._synced = now

    def close(self) -> None:
        """Flush the results and unlock the file."""
        os.fsync(self._handle)
        os.close(self._handle)

    def __enter__(self) -> "ResultJournal":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _line(result: BatchResult) -> bytes:
    text = json.dumps(asdict(result), ensure_ascii=False) + "\n"
    try:
        return text.encode()
    except UnicodeEncodeError:  # an id with half a surrogate pair, which JSON can escape
        return (json.dumps(asdict(result)) + "\n").encode()


def _parse_id(line: bytes) -> PromptId | None:
    """Return the id of a complete result, else None."""
    try:
        answer = json.loads(line)
    except ValueError:
        return None
    if not isinstance(answer, dict) or set(answer) != KEYS:
        return None
    own = answer["id"]
    return own if isinstance(own, str) or is_integer(own) else None
