"""A fuzz target, and the bounds that every input keeps."""

import resource
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from predictors.errors import MoecastError

CORPUS = Path(__file__).parent / "corpus"
MAX_SECONDS = 2.0
"""Processor time for one input of some kilobytes, which takes milliseconds."""
MAX_GROWTH_BYTES = 256 << 20
"""Memory that one input may add to the most that this process has had."""
RSS_UNIT_BYTES = 1 if sys.platform == "darwin" else 1024


class BoundExceeded(Exception):
    """An input took too long or too much memory."""


@dataclass(frozen=True, kw_only=True)
class FuzzTarget:
    """A parser of bytes from elsewhere."""

    name: str
    parse: Callable[[bytes], object]
    """Returns for valid bytes; raises one of `errors` for others."""
    errors: tuple[type[Exception], ...] = (MoecastError,)
    """Documented errors, which a user sees as one line (exit code 2)."""
    share: float = 1.0
    """Mutations relative to the other targets: less if one takes long."""

    @property
    def folder(self) -> Path:
        return CORPUS / self.name

    def corpus(self) -> list[bytes]:
        """Returns the committed inputs, by name."""
        return [path.read_bytes() for path in sorted(self.folder.iterdir())]

    def check(self, data: bytes, *, max_seconds: float = MAX_SECONDS) -> None:
        """Parses the bytes.

        Raises:
            BoundExceeded: it took too long or too much memory.
            Exception: any other is a fault of the parser.
        """
        before, started = peak_bytes(), time.process_time()
        with suppress(self.errors):
            self.parse(data)
        seconds, growth = time.process_time() - started, peak_bytes() - before
        if seconds > max_seconds or growth > MAX_GROWTH_BYTES:
            raise BoundExceeded(f"{len(data)} bytes took {seconds:.1f} s, {growth >> 20} MiB")


def peak_bytes() -> int:
    """Most memory that this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * RSS_UNIT_BYTES
