"""`python -m tests.call_counts`: counts anew, and shows what has changed."""

import sys
import tempfile
from pathlib import Path

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
    before = read_counts() if COUNTS.exists() else {}
    with tempfile.TemporaryDirectory() as folder:
        model, entries = write_random_model(Path(folder))
        now = {cell: count_calls(model, entries, cell) for cell in CELLS}
    for cell, counts in now.items():
        sys.stdout.write(describe_change(cell, counts, before.get(cell, {})) + "\n")
    write_counts(now)


if __name__ == "__main__":
    main()
