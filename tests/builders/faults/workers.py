"""Ends transfer threads as bugs and interpreters do: with an exception that nobody expects."""

import ctypes
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from runtime.engine import Engine

NAME = "moecast "
"""How the names of the runtime's own threads begin."""


def transfer_threads() -> list[threading.Thread]:
    """Those that live."""
    return [thread for thread in threading.enumerate() if thread.name.startswith(NAME)]


def end_thread(thread: threading.Thread) -> None:
    """SystemExit inside the thread, at the next bytecode that it executes."""
    assert thread.ident is not None
    ctypes.pythonapi.PyThreadState_SetAsyncExc(
        ctypes.c_ulong(thread.ident), ctypes.py_object(SystemExit)
    )


class Killed:
    """What was killed."""

    def __init__(self) -> None:
        self.threads: list[threading.Thread] = []

    def __call__(self) -> int:
        return len(self.threads)

    def num_alive(self) -> int:
        """Transfer threads that live and were not killed."""
        return sum(thread not in self.threads for thread in transfer_threads())


@contextmanager
def killed_worker(engine: Engine, *, how: str) -> Iterator[Killed]:
    """A transfer thread of the engine ends while this lasts.

    Args:
        how: `idle`, while it waits for work; `reading`, in the middle of its third read;
            `bug`, by an exception out of its third read.
    """
    killed = Killed()
    if how == "idle":
        killed.threads = transfer_threads()
        for thread in killed.threads:
            end_thread(thread)
        yield killed
        return
    real, calls = engine.store.read, 0

    def read(*args, **kwargs) -> None:
        nonlocal calls
        current = threading.current_thread()
        if current in transfer_threads():
            calls += 1
            if calls == 3:
                killed.threads.append(current)
                if how == "bug":
                    raise RuntimeError("injected: a bug in the store")
                end_thread(current)
                time.sleep(0)
        real(*args, **kwargs)

    engine.store.read = read
    try:
        yield killed
    finally:
        engine.store.read = real
