"""The transfer worker: a thread that does what the policy core says next (promoe algorithm 1)."""

import logging
import threading
from collections.abc import Callable

from runtime.errors import TransferError
from runtime.policy.eviction import Expert
from runtime.policy.prefetcher import Prefetcher, Task

log = logging.getLogger(__name__)

Fetch = Callable[[Task], None]


class Worker:
    """Drives a prefetcher with real reads. All bookkeeping happens under `condition`.

    A failed read is remembered for its expert and raised to whoever needs the expert; a failed
    prefetch that nobody needs costs nothing but a line in the log.
    """

    def __init__(self, prefetcher: Prefetcher, fetch: Fetch):
        self.condition = threading.Condition()
        self.errors: dict[Expert, TransferError] = {}
        self._prefetcher = prefetcher
        self._fetch = fetch
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="moecast-transfer", daemon=True)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def _run(self) -> None:
        while True:
            with self.condition:
                task = None
                while not self._closing and (task := self._prefetcher.next_task()) is None:
                    self.condition.wait()
                if task is None:
                    return
            error = self._transfer(task)
            with self.condition:
                if error is None:
                    self._prefetcher.done(task)
                else:
                    self.errors[task.expert] = error
                    self._prefetcher.failed(task)
                self.condition.notify_all()

    def _transfer(self, task: Task) -> TransferError | None:
        try:
            self._fetch(task)
        except TransferError as error:
            log.warning("layer %d expert %d: %s", *task.expert, error)
            return error
        return None

    def close(self) -> None:
        """Ends the thread after the transfer under way; may be called twice."""
        with self.condition:
            self._closing = True
            self.condition.notify_all()
        self._thread.join()
