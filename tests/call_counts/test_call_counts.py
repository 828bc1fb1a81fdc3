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
    CELLS,
    COMMAND,
    Counts,
    describe_change,
    has_fallen,
    has_grown,
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
    assert not has_grown(now, before), (
        f"{change}. If the growth is wanted, write the new counts: {COMMAND}"
    )
    if has_fallen(now, before):
        warnings.warn(f"{change}. Lower the committed counts: {COMMAND}", stacklevel=1)


@pytest.mark.parametrize(
    ("now", "grown", "fallen"),
    [
        ({"a.py": 60.0, "b.py": 49.0}, False, False),
        ({"a.py": 60.0, "c.py": 51.0}, True, False),
        ({"a.py": 50.0, "b.py": 47.0}, False, True),
        ({"b.py": 100.0}, False, False),
    ],
)
def test_growth__is_that_of_the_total(now: Counts, grown: bool, fallen: bool) -> None:
    before = {"a.py": 50.0, "b.py": 50.0}
    assert has_grown(now, before) is grown
    assert has_fallen(now, before) is fallen


def test_change__names_the_files() -> None:
    text = describe_change("x, 25 %", {"a.py": 70.0, "b.py": 5.0}, {"a.py": 50.0, "b.py": 5.0})
    assert text == "x, 25 %: 75.0 calls per layer and token, 55.0 committed (a.py +20.0)"
