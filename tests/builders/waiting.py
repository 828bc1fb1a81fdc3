"""Waits for what other threads and processes do."""

import time
from collections.abc import Callable
from typing import TypeVar

Found = TypeVar("Found")


def wait_for(
    condition: Callable[[], Found], what: str = "a condition", *, seconds=240.0, pause=0.02
) -> Found:
    """Returns what the condition gives as soon as that is true, and fails after some time."""
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, f"waited in vain: {what}"
        time.sleep(pause)
    return found
