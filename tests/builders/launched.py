"""Work for launchers.

Each unit is a file, committed by a rename, and a line in a log of units that were begun. Its name
says how it goes: `fine-1`, `fails-1-2` (fails twice), `kills-1-1` (kills its worker once),
`wrong-1` (an error of the user), `slow-1`.
"""

import os
import signal
import time
from pathlib import Path
from typing import Any

from collect.launch.processes import DoUnit
from predictors.errors import MoecastError
from predictors.files import write_atomic

SLOW_SECONDS = 0.4
HELD_SECONDS = 0.05


def open_work(folder: str, refuses: str = "", breaks: bool = False) -> DoUnit:
    if refuses:
        raise MoecastError(refuses)
    if breaks:
        raise ImportError("no such library")
    home = Path(folder)

    def do(unit: str) -> Any:
        kind, *numbers = unit.split("-")
        path = home / unit
        if path.exists():
            return {"unit": unit}
        with (home / "begun.log").open("a") as log:
            log.write(f"{unit} {os.getpid()}\n")
        begun = (home / "begun.log").read_text().split().count(unit)
        print(f"noise of {unit}", flush=True)  # noqa: T201
        if kind == "slow":
            time.sleep(SLOW_SECONDS)
        if kind == "wrong":
            raise MoecastError(f"{unit} is wrong")
        if kind in ("fails", "kills") and begun <= int(numbers[1]):
            if kind == "kills":
                os.kill(os.getpid(), signal.SIGKILL)
            raise OSError(f"{unit} fails")
        write_atomic(path, f"content of {unit}".encode())
        return {"unit": unit}

    return do


def open_held_trace(folder: str, units: int, held: list[int], home: str) -> DoUnit:
    """Units of a synthetic trace; each of `held` waits until the file HOME/release-UNIT is there.

    HOME/begun.log gets a line for each unit that is begun: the unit and its Slurm job.
    """
    from collect.traces import TraceWriter
    from tests.builders.traces import make_plan, make_spec, unit_content

    plan = make_plan(make_spec(), num_units=units, requests_per_unit=2)
    names = ("SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID")
    job = "_".join(os.environ[name] for name in names if name in os.environ)

    def do(digest: str) -> Any:
        writer, unit = TraceWriter(folder, plan, joins=True), plan.units.index(digest)
        if writer.has(unit):
            return
        with Path(home, "begun.log").open("a") as lines:
            lines.write(f"{unit} {job}\n")
        while unit in held and not Path(home, f"release-{unit}").exists():
            time.sleep(HELD_SECONDS)
        writer.write(unit, *unit_content(plan, unit))

    return do


def open_surroundings() -> DoUnit:
    """Each unit returns what its worker may use."""

    def do(unit: str) -> Any:
        gpus, threads = os.environ.get("CUDA_VISIBLE_DEVICES"), os.environ["OMP_NUM_THREADS"]
        return {"gpus": gpus, "threads": threads}

    return do
