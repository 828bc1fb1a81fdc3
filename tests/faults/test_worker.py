"""Transfer threads that end or hang."""

from dataclasses import asdict

import pytest

from tests.builders.faults.rules import Rule

pytestmark = pytest.mark.faults

DETECTED_SECONDS = 2.0
"""In which a dead or hung worker must be seen and done without."""


@pytest.mark.parametrize("mode", ["prefetch", "on-demand"])
@pytest.mark.parametrize("how", ["idle", "reading", "bug"])
def test_worker__a_dead_one_is_replaced_and_output_is_identical(scenario, mode, how):
    result = scenario("worker_killed", mode=mode, how=how)
    assert result["num_faults"] >= 1
    for when in ("before", "during", "after"):
        assert result[when]["outcome"] == "identical"
    usual = result["before"]["seconds"]
    assert result["during"]["seconds"] < usual + DETECTED_SECONDS
    assert result["workers"] >= 1


@pytest.mark.parametrize("mode", ["prefetch", "on-demand"])
def test_worker__a_read_that_hangs_is_done_without(scenario, disk, mode):
    hang = Rule("hang", seconds=6.0, times=1)
    result = scenario(
        "spoilt_disk",
        mode=mode,
        mount=str(disk.mount),
        control=str(disk.control),
        rules=[asdict(hang)],
        heals_in=6.0,
    )
    assert result["num_faults"] == 1
    for when in ("before", "during", "after", "healed"):
        assert result[when]["outcome"] == "identical"
    assert result["during"]["seconds"] < result["before"]["seconds"] + DETECTED_SECONDS
    assert result["close_seconds"] < 1.0
