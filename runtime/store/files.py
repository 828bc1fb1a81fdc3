"""Reads byte ranges of files: complete, or with an error that says where and what to do."""

import os
import threading
import time
from pathlib import Path

from runtime.errors import TransferError

ATTEMPTS = 3
"""A disk that fails a read often succeeds at the next; one that does not is broken."""
PAUSE_SECONDS = 0.01
"""Between attempts."""


class FileReader:
    """Open descriptors by path. Thread-safe."""

    def __init__(self) -> None:
        self._descriptors: dict[Path, int] = {}
        self._lock = threading.Lock()

    def _descriptor(self, file: Path) -> int:
        with self._lock:
            if file not in self._descriptors:
                self._descriptors[file] = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
            return self._descriptors[file]

    def read(self, file: Path, offset: int, target: memoryview, *, what: str) -> None:
        """Fills `target` from `offset` of the file.

        Args:
            what: name of what is read, for the error.

        Raises:
            TransferError: the file ends too soon, or the last of three attempts failed.
        """
        for attempt in range(ATTEMPTS):
            try:
                self._read_once(file, offset, target, what)
            except OSError as error:
                if attempt + 1 == ATTEMPTS:
                    raise TransferError(
                        f"{file}: reading {len(target)} bytes of {what} at {offset} failed "
                        f"{ATTEMPTS} times: {error}; check the disk, or fetch the file again"
                    ) from error
                time.sleep(PAUSE_SECONDS)
            else:
                return

    def _read_once(self, file: Path, offset: int, target: memoryview, what: str) -> None:
        descriptor = self._descriptor(file)
        done = 0
        while done < len(target):
            count = os.preadv(descriptor, [target[done:]], offset + done)
            if count == 0:
                raise TransferError(
                    f"{file}: ends at byte {offset + done}, inside {what}; "
                    "the file was truncated: fetch it again"
                )
            done += count

    def close(self) -> None:
        """Closes the files; no read may be under way."""
        with self._lock:
            while self._descriptors:
                os.close(self._descriptors.popitem()[1])
