"""The worker's side: opens the work once, then does unit after unit, for every engine.

An entry point is named as `package.module:function`. It takes JSON arguments by keyword and returns
a function from a unit's name to a JSON value. That function commits its result by an atomic rename
and does nothing where the result exists already, so that a unit may be tried twice.
"""

import json
import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from importlib import import_module
from typing import Any

from predictors.errors import MoecastError, describe_error
from runtime.openmp import let_waiting_threads_sleep

DoUnit = Callable[[str], Any]


@dataclass(frozen=True, kw_only=True)
class UnitResult:
    """The outcome of one attempt at a unit."""

    unit: str
    value: Any = None
    """JSON that the entry point's function returned."""
    error: str = ""
    """One line; empty for a success."""
    is_fatal: bool = False
    """A retry cannot help: the user's error, or the work cannot be opened."""

    def at(self, place: str) -> "UnitResult":
        """Returns a result whose error names the place, unless the error is the user's."""
        if not self.error or self.is_fatal:
            return self
        return replace(self, error=f"{self.error} ({place})")

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "UnitResult":
        return cls(**json.loads(text))


class UnitWorker:
    """Does units of one entry point, which it opens once."""

    def __init__(self, entry: str, arguments: str, threads: int):
        self.entry = entry
        self.arguments = arguments
        self.threads = threads
        self._do: DoUnit | None = None

    def open(self) -> None:
        """Loads the model or whatever the work needs, unless that was done before.

        Returns nothing: an actor's result is pickled, and a served model cannot be.
        """
        if self._do is None:
            # Before torch is imported, which reads them once.
            os.environ["OMP_NUM_THREADS"] = str(self.threads)
            let_waiting_threads_sleep()
            module, _, function = self.entry.partition(":")
            self._do = getattr(import_module(module), function)(**json.loads(self.arguments))
            if "torch" in sys.modules:
                sys.modules["torch"].set_num_threads(self.threads)

    def run(self, unit: str) -> str:
        """Returns the `UnitResult` as JSON; an exception's traceback goes to the log."""
        try:
            self.open()
        except Exception as error:
            return UnitResult(unit=unit, error=_describe(error), is_fatal=True).to_json()
        # Whatever the exception, the model stays loaded for the next unit.
        assert self._do is not None
        try:
            return UnitResult(unit=unit, value=self._do(unit)).to_json()
        except Exception as error:
            is_fatal = isinstance(error, MoecastError)
            return UnitResult(unit=unit, error=_describe(error), is_fatal=is_fatal).to_json()


def _describe(error: Exception) -> str:
    """One line for the pool; the traceback goes to the worker's log."""
    if isinstance(error, MoecastError):
        return str(error)
    traceback.print_exc()
    return describe_error(error)
