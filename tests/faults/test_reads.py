"""Reads that fail, fall short or are late."""

import re

import pytest

from runtime.config import SystemConfig
from tests.builders.faults.rules import Disk, Rule

pytestmark = pytest.mark.faults


def spoilt(scenario, disk: Disk, mode: str, rule: Rule, **kwargs) -> dict:
    return scenario("spoilt_disk", disk=disk, mode=mode, rule=rule, **kwargs)


def outcomes(result: dict) -> list[str]:
    return [result[when]["outcome"] for when in ("before", "during", "after")]


def error_of(result: dict) -> str:
    """The message of the request during which reads failed, which was the only one to fail."""
    before, during, after = outcomes(result)
    assert before == after == "identical"
    assert during.startswith("error: ")
    return during


MODES = ("prefetch", "on-demand", "packed", "tiers")
FREEZING = {"system": SystemConfig(watchdog_seconds=0.3), "well_after_seconds": 1.5}
HASTY = {"system": SystemConfig(watchdog_seconds=0.06)}
SLOW = Rule("hang", seconds=0.1, times=30)
FAULTS = {
    "an error twice": (Rule("eio", times=2), MODES, 2, 0.0, {}),
    "short reads": (Rule("short"), ("prefetch", "packed"), 11, 0.0, {}),
    "a flipped bit once": (Rule("flip", times=1), ("packed",), 1, 0.0, {}),
    "50 ms a read": (Rule("hang", seconds=0.05, times=40), ("prefetch", "on-demand"), 1, 0.5, {}),
    "a freeze": (Rule("freeze"), ("prefetch", "tiers"), 1, 0.0, FREEZING),
    "slower than the watchdog": (SLOW, ("prefetch", "tiers"), 4, 0.0, HASTY),
}
"""Rule, modes, least number of faults, least seconds of waiting, and options."""


RUNS = [(mode, name) for name, (_, modes, *_) in FAULTS.items() for mode in modes]


@pytest.mark.parametrize(("mode", "name"), RUNS)
def test_reads__a_disk_that_fails_for_a_time_or_is_slow_changes_nothing(scenario, disk, mode, name):
    rule, _, num_faults, stall_seconds, options = FAULTS[name]
    result = spoilt(scenario, disk, mode, rule, **options)
    assert outcomes(result) == ["identical"] * 3
    assert result["num_faults"] >= num_faults
    assert result["during"]["stall_seconds"] >= stall_seconds


@pytest.mark.parametrize("mode", ["prefetch", "packed", "tiers"])
def test_reads__a_bad_disk_fails_one_request_and_names_the_place(scenario, disk, mode):
    error = error_of(spoilt(scenario, disk, mode, Rule("eio")))
    for part in ("/model-0" if mode != "packed" else "/packed/", "Input/output error", " at "):
        assert part in error
    assert re.search(r"experts?.\d+", error)


@pytest.mark.parametrize("mode", ["prefetch", "packed"])
def test_reads__a_truncated_shard_is_named_and_served_when_whole_again(scenario, disk, mode):
    assert "truncated" in error_of(spoilt(scenario, disk, mode, Rule("truncate", start=2000)))


@pytest.mark.usefixtures("disk")
def test_reads__a_disk_that_goes_and_comes_back_serves_again(scenario, tmp_path):
    assert error_of(scenario("disk_comes_back", folder=str(tmp_path / "again")))


def test_reads__a_flipped_bit_of_a_packed_store_is_an_error(scenario, disk):
    error = error_of(spoilt(scenario, disk, "packed", Rule("flip")))
    assert re.match(r"error: .*\(layer \d+, expert \d+, chunk \d+\) are damaged", error)


def test_reads__a_flipped_bit_of_a_checkpoint_is_not_noticed(scenario, disk):
    """Safetensors has no checksum of its data. `moecast pack` adds some; the built-in
    model has digests that are checked when it is loaded."""
    assert outcomes(spoilt(scenario, disk, "on-demand", Rule("flip")))[:2] == ["identical", "wrong"]
