"""Recorded requests, and writers of them that are killed at each disk operation.

    python -m tests.builders.growing FOLDER

makes FOLDER/0, FOLDER/1, ... of which each writer got a SIGKILL before its n-th fsync, rename or
link; prints how many.
"""

import os
import sys
from pathlib import Path

from collect.traces.growing import GrowingTrace, ServedRequest
from collect.traces.layout import TraceSignal
from tests.builders.killed_writers import killed_before
from tests.builders.traces import make_plan, make_spec, unit_content

NUM_ADDITIONS, PER_ADDITION = 2, 3
SIGNALS = (TraceSignal.GATE_INPUT, TraceSignal.EXPERTS, TraceSignal.WEIGHTS)


def open_growing(folder: Path) -> GrowingTrace:
    return GrowingTrace(folder, make_spec())


def make_request(number: int) -> ServedRequest:
    """A request of 4 to 9 rows, of which the last two are generated."""
    plan = make_plan(make_spec(), requests_per_unit=1, signals=SIGNALS)
    prompt = 2 + number % 6
    arrays, (request,) = unit_content(plan, number, prompt_tokens=prompt, new_tokens=2)
    return ServedRequest(
        digest=request.digest,
        first_position=number,
        prompt_tokens=prompt,
        columns={name: values for name, values in arrays.items() if "." in name},
    )


def write_in_a_child(folder: Path, *, operation: int) -> bool:
    """True when the writer came to its end."""
    child = os.fork()
    if child == 0:
        trace = open_growing(folder)
        killed_before(operation)
        for addition in range(NUM_ADDITIONS):
            first = addition * PER_ADDITION
            trace.add([make_request(first + i) for i in range(PER_ADDITION)])
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
    return not os.WIFSIGNALED(status)


def main(folder: Path) -> int:
    operation = 0
    while not write_in_a_child(folder / str(operation), operation=operation):
        operation += 1
    return operation


if __name__ == "__main__":
    sys.stdout.write(str(main(Path(sys.argv[1]))))
