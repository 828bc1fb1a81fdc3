"""A decode step makes no more calls than it did.

On a GPU these calls take longer than a small model's computation, and no other test would notice if
they doubled. Times on a shared machine vary by more than that.
"""

import warnings

import pytest

from tests.call_counts.count import CELLS, COUNTS

ALLOWED = 0.10
"""Growth of a count that is accepted."""
NOTABLE = 0.02
"""Fall of a count that is reported."""


@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.timeout(330)
def test_calls__have_not_grown(cell: str) -> None:
    now, before = COUNTS.now[cell], COUNTS.committed[cell]
    change = {file: round(now.get(file, 0) - before.get(file, 0), 1) for file in {*now, *before}}
    largest = sorted(change.items(), key=lambda item: -abs(item[1]))[:5]
    growth = sum(now.values()) / sum(before.values()) - 1
    said = f"{cell}: {growth:+.1%} calls ({largest}); `python -m {COUNTS.module}` writes new counts"
    assert growth <= ALLOWED, said
    if growth < -NOTABLE:
        warnings.warn(said, stacklevel=1)
