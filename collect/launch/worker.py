"""A worker: opens the work once, then does unit after unit. The same loop for every engine.

    python -m collect.launch.worker

is one of launcher=local: it reads the task and then units from its standard input, a line each, and
writes messages to its standard output. It ends with its standard input.
"""

import os
import queue
import sys
import threading
import traceback
from collections.abc import Callable

from collect.launch.task import Kind, Message, Task, Work
from predictors.errors import MoecastError

Send = Callable[[Message], None]
Receive = Callable[[], str | None]
"""The next unit; None: there is no more to do."""


def serve(task: Task, receive: Receive, send: Send) -> None:
    """Opens the work and does what is received, until there is no more."""
    # Before torch is imported, which reads it once.
    os.environ["OMP_NUM_THREADS"] = str(task.threads)
    work = _opened(task, send)
    if work is None:
        return
    send(Message(Kind.READY, value=work.about))
    while (unit := receive()) is not None:
        send(_done(work, unit, send))


def _opened(task: Task, send: Send) -> Work | None:
    try:
        work = task.open()
    except MoecastError as error:
        send(Message(Kind.DIED, error=str(error), is_users=True))
    except Exception as error:
        send(Message(Kind.DIED, error=_told(error)))
    else:
        if "torch" in sys.modules:
            sys.modules["torch"].set_num_threads(task.threads)
        return work
    return None


def _done(work: Work, unit: str, send: Send) -> Message:
    def report(amount: int) -> None:
        send(Message(Kind.ADVANCED, unit, amount=amount))

    # Whatever a unit fails of, its worker has the model still and can do others.
    try:
        return Message(Kind.DONE, unit, value=work.do(unit, report))
    except MoecastError as error:
        return Message(Kind.FAILED, unit, error=str(error), is_users=True)
    except Exception as error:
        return Message(Kind.FAILED, unit, error=_told(error))


def _told(error: Exception) -> str:
    """One line for the dispatcher; the traceback goes to the worker's log."""
    traceback.print_exc()
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def main() -> None:
    """One process of launcher=local."""
    # What libraries print must not come between messages.
    messages = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    task = Task.from_json(sys.stdin.readline())
    units: queue.SimpleQueue[str] = queue.SimpleQueue()

    def listen() -> None:
        for line in sys.stdin:
            units.put(line.rstrip("\n"))
        # Nobody waits for the unit any more; what is not committed is made again.
        os._exit(0)

    threading.Thread(target=listen, daemon=True).start()
    serve(task, units.get, lambda message: print(message.to_json(), file=messages, flush=True))
    os._exit(1)


if __name__ == "__main__":
    main()
