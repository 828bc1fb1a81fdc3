"""strace, attached to this process, changes the results of its system calls while it is there."""

import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.builders.killing import in_a_child

PR_SET_PTRACER = 0x59616D61
PR_SET_PTRACER_ANY = -1
"""Lets a child trace its parent where the kernel's Yama module would not."""


class CannotTraceError(Exception):
    """This machine does not let strace attach."""


@contextmanager
def injected(spec: str, *, paths: Sequence[Path], log: Path) -> Iterator[None]:
    """All threads of this process see `spec`, as in `strace -e inject=SPEC`, on these files.

    A `when=` counts for each thread apart, from the moment of attaching.

    Raises:
        CannotTraceError: ptrace is not allowed here.
    """
    ctypes.CDLL(None).prctl(PR_SET_PTRACER, ctypes.c_ulong(PR_SET_PTRACER_ANY), 0, 0, 0)
    call = spec.split(":")[0]
    command = ["strace", "-f", "-q", "-o", str(log), "-e", f"trace={call}", "-e", f"inject={spec}"]
    for path in paths:
        command += ["-P", str(path)]
    tracer = subprocess.Popen([*command, "-p", str(os.getpid())], stderr=subprocess.PIPE, text=True)
    try:
        _await_tracer(tracer)
        yield
    finally:
        if tracer.poll() is None:
            tracer.send_signal(signal.SIGINT)
        tracer.wait(60)


ENDED = "ended"


def killed(spec: str, work: Callable[[], None], *, log: Path) -> str | None:
    """Does `work` in a separate process, under `spec`, which kills it (`signal=SIGKILL`).

    Returns:
        None when it was killed, `ENDED` when it came to its end, else why it was not tried.
    """

    def traced() -> None:
        try:
            with injected(spec, paths=[], log=log):
                work()
        except CannotTraceError:
            os._exit(2)

    code = in_a_child(traced)
    assert code in (0, 2, -signal.SIGKILL), "the work failed"
    return {0: ENDED, 2: "strace may not attach here"}.get(code)


def _await_tracer(tracer: subprocess.Popen) -> None:
    deadline = time.monotonic() + 60
    while not all(map(_is_traced, Path("/proc/self/task").iterdir())):
        if tracer.poll() is not None or time.monotonic() > deadline:
            tracer.kill()
            raise CannotTraceError(tracer.stderr.read().strip())
        time.sleep(0.005)


def _is_traced(task: Path) -> bool:
    try:
        lines = (task / "status").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):  # the thread has ended
        return True
    return "TracerPid:\t0" not in lines
