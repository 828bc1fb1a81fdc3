"""Ends and disturbs threads with unexpected exceptions, as bugs, interpreters and users do."""

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from unittest.mock import patch

from runtime.engine.engine import Engine
from runtime.errors import TransferError
from tests.builders.served import read_in_python

PREFIX = "moecast "
"""How the names of the runtime's own threads begin."""


def transfer_threads() -> list[threading.Thread]:
    """Those that live."""
    return [thread for thread in threading.enumerate() if thread.name.startswith(PREFIX)]


def end_thread(thread: threading.Thread) -> None:
    """SystemExit inside the thread, at the next bytecode that it executes."""
    number, error = ctypes.c_ulong(thread.ident), ctypes.py_object(SystemExit)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(number, error)


LOCKS = (type(threading.Lock()), type(threading.RLock()))


@contextmanager
def interrupt_at_call(number: int | None) -> Iterator[Callable[[], int]]:
    """Ctrl-C when this thread, the main one, calls or leaves its n-th function.

    Args:
        number: None only counts.

    Yields:
        Returns how many calls and returns there were.
    """
    count = 0

    def profile(frame: FrameType, event: str, called: object) -> None:
        nonlocal count
        # Python's own Condition is not safe against interrupts while it takes or gives its lock.
        if frame.f_code.co_filename == threading.__file__:
            return
        # A real interrupt comes after the call by which a `with` gives a lock, never before it.
        if event == "c_call" and isinstance(getattr(called, "__self__", None), LOCKS):
            return
        count += 1
        if count == number:
            signal.raise_signal(signal.SIGINT)

    sys.setprofile(profile)
    try:
        yield lambda: count
    finally:
        sys.setprofile(None)


def signal_main_thread() -> None:
    """Ctrl-C."""
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(0.05)


def refuse() -> None:
    """What a store says that cannot read."""
    raise TransferError("injected: the store refuses")


@contextmanager
def before_read(
    engine: Engine, first: int, disturb: Callable[[], None], *, times: int = 1, by_workers=False
) -> Iterator[None]:
    """Calls `disturb` at the start of reads `first`, `first + 1`, ... of the engine's store.

    Args:
        by_workers: counts the reads of transfer threads only.
    """
    read_in_python(engine)
    real, calls = engine.store.read, 0

    def read(*args, **kwargs) -> None:
        nonlocal calls
        if not by_workers or threading.current_thread() in transfer_threads():
            calls += 1
            if first <= calls < first + times:
                disturb()
        real(*args, **kwargs)

    with patch.object(engine.store, "read", read):
        yield


@contextmanager
def killed_worker(engine: Engine, *, how: str) -> Iterator[list[threading.Thread]]:
    """Transfer threads of the engine end while this lasts; yields those that did.

    Args:
        how: `idle`, while it waits for work; `reading`, in the middle of its second read;
            `bug`, by an exception out of its second read.
    """
    killed: list[threading.Thread] = []

    def end_reader() -> None:
        killed.append(threading.current_thread())
        if how == "bug":
            raise RuntimeError("injected: a bug in the store")
        end_thread(threading.current_thread())
        time.sleep(0)

    if how == "idle":
        killed += transfer_threads()
        for thread in killed:
            end_thread(thread)
        yield killed
    else:
        with before_read(engine, 2, end_reader, by_workers=True):
            yield killed
