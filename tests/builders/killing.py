"""Forked processes that are killed at a chosen call: importing takes far longer than the work."""

import os
import signal
import traceback
from collections.abc import Callable
from typing import Any


def in_a_child(work: Callable[[], object]) -> int:
    """Does the work in a forked process; returns its exit code, negative for a signal."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            work()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def kill_before(number: int, *places: tuple[Any, str]) -> None:
    """SIGKILL for this process in place of a call, with this number from 0, of the functions."""
    left = number

    def counted(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal left
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            left -= 1
            return real(*args, **kwargs)

        return call

    for owner, name in places:
        setattr(owner, name, counted(getattr(owner, name)))
