"""Work for launchers: each unit is a file, committed by a rename, and a line in a log of what
was begun. How a unit goes is told by its name: `fine-1`, `fails-1-2` (fails twice), `kills-1-1`
(kills its worker once), `wrong-1` (something only the user can mend), `slow-1`."""

import os
import signal
import time
from pathlib import Path
from typing import Any

from collect.launch.task import Report, Work
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


def open_surroundings() -> Work:
    """Each unit says what its worker may use."""

    def do(unit: str, report: Report) -> Any:
        gpus, threads = os.environ.get("CUDA_VISIBLE_DEVICES"), os.environ["OMP_NUM_THREADS"]
        return {"gpus": gpus, "threads": threads}

    return Work(do)
