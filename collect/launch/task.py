"""What a worker is asked to do, and what it says: all of it JSON, so that no object is pickled."""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from enum import StrEnum
from importlib import import_module
from typing import Any, Protocol


class Report(Protocol):
    """Called by a worker with the amount of work that it has done since its last call."""

    def __call__(self, amount: int, /) -> None: ...


@dataclass(frozen=True)
class Work:
    """What a worker can do once its model is loaded."""

    do: Callable[[str, Report], Any]
    """Unit and report to a JSON value; commits its result by an atomic rename, and does nothing
    where that result is there already."""
    about: Any = None
    """JSON that the dispatcher is told before the first unit."""


@dataclass(frozen=True)
class Task:
    """Which function opens the work, and its arguments."""

    entry: str
    """`package.module:function`, which takes `arguments` by keyword and returns a `Work`."""
    arguments: dict[str, Any]
    """JSON values."""
    threads: int = 1

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Task":
        return cls(**json.loads(text))

    def open(self) -> Work:
        """In the worker: takes as long as loading a model does."""
        module, _, function = self.entry.partition(":")
        return getattr(import_module(module), function)(**self.arguments)


class Kind(StrEnum):
    """What a worker says."""

    READY = "ready"
    ADVANCED = "advanced"
    DONE = "done"
    FAILED = "failed"
    DIED = "died"


@dataclass(frozen=True)
class Message:
    """From a worker; which one is known from where it comes."""

    kind: Kind
    unit: str | None = None
    amount: int = 0
    """Of ADVANCED."""
    value: Any = None
    """Of READY, what the work is about; of DONE, the unit's result."""
    error: str = ""
    is_users: bool = False
    """Of FAILED and DIED: something that only the user can mend; no use to try it again."""

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Message":
        fields = json.loads(text)
        return cls(**{**fields, "kind": Kind(fields["kind"])})


class Crew(Protocol):
    """Workers of one engine, by number."""

    def start(self, worker: int) -> None:
        """Starts this worker, or a new one in the place of one that has died. It says READY."""
        ...

    def give(self, worker: int, unit: str) -> None:
        """Hands a unit to a worker that has none. It says DONE or FAILED, or dies."""
        ...

    def events(self, timeout_seconds: float) -> list[tuple[int, Message]]:
        """What workers have said since; waits, at most so long, for the first of it."""
        ...

    def close(self) -> None:
        """Ends every worker, whatever it is doing."""
        ...
