"""`python -m tests.call_counts`: counts anew, and shows what has changed.

With `--print` it prints the counts as JSON and writes nothing.
"""

import json
import os
import sys
import tempfile
from pathlib import Path

from runtime.compiled import VARIABLE
from tests.call_counts.count import (
    CELLS,
    COUNTS,
    count_calls,
    describe_change,
    read_counts,
    write_counts,
    write_random_model,
)


def main() -> None:
    if os.environ.get(VARIABLE) != "0":
        # Calls of compiled functions are not reported: the Python files are counted, and a core
        # that is out of date must not leave other compiled code in use.
        command = [sys.executable, "-m", "tests.call_counts", *sys.argv[1:]]
        os.execve(sys.executable, command, {**os.environ, VARIABLE: "0"})
    with tempfile.TemporaryDirectory() as folder:
        model, entries = write_random_model(Path(folder))
        now = {cell: count_calls(model, entries, cell) for cell in CELLS}
    if "--print" in sys.argv:
        sys.stdout.write(json.dumps(now))
        return
    before = read_counts() if COUNTS.exists() else {}
    for cell, counts in now.items():
        sys.stdout.write(describe_change(cell, counts, before.get(cell, {})) + "\n")
    write_counts(now)


if __name__ == "__main__":
    main()
