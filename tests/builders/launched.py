"""Work for launchers: each unit is a file, committed by a rename, and a line in a log of what
was begun. How a unit goes is told by its name: `fine-1`, `fails-1-2` (fails twice), `kills-1-1`
(kills its worker once), `wrong-1` (something only the user can mend), `slow-1`."""

import os
import signal
import time
from pathlib import Path
from typing import Any

from collect.launch.task import Kind, Message, Report, Task, Work
from predictors.errors import MoecastError
from predictors.files import write_atomic

SLOW_SECONDS = 0.4


def open_work(folder: str, refuses: str = "", breaks: bool = False) -> Work:
    if refuses:
        raise MoecastError(refuses)
    if breaks:
        raise ImportError("no such library")
    home = Path(folder)

    def do(unit: str, report: Report) -> Any:
        kind, *numbers = unit.split("-")
        path = home / unit
        if path.exists():
            return {"unit": unit}
        with (home / "begun.log").open("a") as log:
            log.write(f"{unit} {os.getpid()}\n")
        begun = (home / "begun.log").read_text().split().count(unit)
        report(1)
        print(f"noise of {unit}")  # noqa: T201
        if kind == "slow":
            time.sleep(SLOW_SECONDS)
        if kind == "wrong":
            raise MoecastError(f"{unit} is wrong")
        if kind in ("fails", "kills") and begun <= int(numbers[1]):
            if kind == "kills":
                os.kill(os.getpid(), signal.SIGKILL)
            raise OSError(f"{unit} fails")
        report(1)
        write_atomic(path, f"content of {unit}".encode())
        return {"unit": unit}

    return Work(do, about={"folder": folder})


def open_trace(folder: str, log: str) -> Work:
    """Units of a synthetic trace of sixty parts; a line in the log for each that is begun."""
    from collect.traces import TraceWriter
    from tests.builders.traces import make_plan, make_spec, unit_content

    plan = make_plan(make_spec(), num_units=60, requests_per_unit=2)

    def do(digest: str, report: Report) -> Any:
        writer, unit = TraceWriter(folder, plan, joins=True), plan.units.index(digest)
        if writer.has(unit):
            return
        with Path(log).open("a") as lines:
            lines.write(f"{unit}\n")
        time.sleep(SLOW_SECONDS)
        writer.write(unit, *unit_content(plan, unit))

    return Work(do)


def open_surroundings() -> Work:
    """Each unit says what its worker may use."""

    def do(unit: str, report: Report) -> Any:
        gpus, threads = os.environ.get("CUDA_VISIBLE_DEVICES"), os.environ["OMP_NUM_THREADS"]
        return {"gpus": gpus, "threads": threads}

    return Work(do)


class InlineCrew:
    """One worker in this very process, that no process has to be started for. `broken` units fail,
    as often as they are tried."""

    def __init__(self, task: Task, *, broken: str | None = None):
        self._work = Task.from_json(task.to_json()).open()
        self._broken = broken
        self._said: list[tuple[int, Message]] = []
        self.given: list[str] = []

    def start(self, worker: int) -> None:
        self._say(worker, Message(Kind.READY, value=self._work.about))

    def give(self, worker: int, unit: str) -> None:
        self.given.append(unit)
        if self._broken is not None and self._broken in unit:
            self._say(worker, Message(Kind.FAILED, unit, error="OSError: broken"))
            return

        def report(amount: int) -> None:
            self._say(worker, Message(Kind.ADVANCED, unit, amount=amount))

        self._say(worker, Message(Kind.DONE, unit, value=self._work.do(unit, report)))

    def events(self, timeout_seconds: float) -> list[tuple[int, Message]]:
        said, self._said = self._said, []
        return said

    def close(self) -> None:
        pass

    def _say(self, worker: int, message: Message) -> None:
        # What can not be told in JSON could not be told by another process.
        self._said.append((worker, Message.from_json(message.to_json())))
