"""A decode step makes no more calls than it did.

On a GPU these calls take longer than a small model's computation, and no other test would notice if
they doubled. Times on a shared machine vary by more than that.
"""

import json
import warnings
from collections.abc import Mapping

import pytest

from tests.builders.processes import run_python
from tests.call_counts.count import (
    ALLOWED,
    CELLS,
    COMMAND,
    NOTABLE,
    Counts,
    describe_change,
    read_counts,
)


@pytest.fixture(scope="module")
def counts() -> Mapping[str, Counts]:
    """Counts of another process: in this one, the policy core may be compiled."""
    return json.loads(run_python("-m", "tests.call_counts", "--print", timeout=300).stdout)


@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.timeout(330)
def test_calls__have_not_grown(counts: Mapping[str, Counts], cell: str) -> None:
    now, before = counts[cell], read_counts()[cell]
    change = describe_change(cell, now, before)
    growth = sum(now.values()) / sum(before.values()) - 1
    assert growth <= ALLOWED, f"{change}. If the growth is wanted, write the new counts: {COMMAND}"
    if growth < -NOTABLE:
        warnings.warn(f"{change}. Lower the committed counts: {COMMAND}", stacklevel=1)
