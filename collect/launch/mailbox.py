"""Messages as numbered files of a folder that two machines share: no port, no lock, no server.

A message appears by a rename, so that none is read in part; each side reads its numbers in order.
"""

import itertools
import time
from collections.abc import Iterator
from pathlib import Path

from predictors.files import write_atomic

POLL_SECONDS = 0.2
SILENCE_SECONDS = 600.0
"""After so long without a sign of the dispatcher, a worker takes it for dead and ends. Network
disks may show a new file only after a minute."""
BEAT_SECONDS = 20.0
BEAT = "beat"


class Mailbox:
    """One direction: one side writes, the other reads."""

    def __init__(self, folder: Path):
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._written = itertools.count()
        self._next = 0

    def write(self, text: str) -> None:
        write_atomic(self._folder / f"{next(self._written):06d}", text.encode())

    def read(self) -> Iterator[str]:
        """What has come since; does not wait."""
        while True:
            path = self._folder / f"{self._next:06d}"
            try:
                text = path.read_text()
            except FileNotFoundError:
                return
            self._next += 1
            yield text

    def wait(self, pulse: "Pulse") -> str | None:
        """The next message; None when the other side gives no sign of life any more."""
        while pulse.is_felt():
            for text in self.read():
                return text
            time.sleep(POLL_SECONDS)
        return None


class Beat:
    """Written by the dispatcher: says that it lives."""

    def __init__(self, folder: Path):
        self._path = folder / BEAT
        self._number = 0
        self._told = float("-inf")

    def tell(self) -> None:
        """Now and then, however often it is called."""
        now = time.monotonic()
        if now - self._told >= BEAT_SECONDS:
            self._told = now
            self._number += 1
            write_atomic(self._path, str(self._number).encode())


class Pulse:
    """Watched by a worker. By what the file says, not by its time: clocks of machines differ."""

    def __init__(self, folder: Path, *, silence_seconds: float = SILENCE_SECONDS):
        self._path = folder / BEAT
        self._silence = silence_seconds
        self._last = b""
        self._changed = time.monotonic()

    def is_felt(self) -> bool:
        now = time.monotonic()
        if self._path.exists() and (beat := self._path.read_bytes()) != self._last:
            self._last, self._changed = beat, now
        return now - self._changed < self._silence
