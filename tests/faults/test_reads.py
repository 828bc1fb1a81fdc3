"""Reads that fail, fall short or are late, at the system call and on the disk."""

import re
from dataclasses import asdict

import pytest

from tests.builders.faults.rules import Disk, Rule
from tests.builders.faults.syscalls import READS
from tests.faults.conftest import Scenario

pytestmark = pytest.mark.faults


def spoilt(scenario: Scenario, disk: Disk, mode: str, *rules: Rule, **kwargs) -> dict:
    rules = [asdict(rule) for rule in rules]
    return scenario("spoilt_disk", disk=disk, mode=mode, rules=rules, **kwargs)


def outcomes(result: dict) -> list[str]:
    return [result[when]["outcome"] for when in ("before", "during", "after")]


@pytest.mark.usefixtures("strace")
@pytest.mark.parametrize(
    ("mode", "when"), [("prefetch", "5+7"), ("on-demand", "1"), ("packed", "5+7")]
)
def test_reads__a_system_call_that_fails_now_and_then_changes_nothing(scenario, mode, when):
    result = scenario("spoilt_system_calls", mode=mode, inject=f"{READS}:error=EIO:when={when}")
    assert result["num_faults"] >= 1
    assert outcomes(result) == ["identical"] * 3


@pytest.mark.usefixtures("strace")
@pytest.mark.parametrize("mode", ["prefetch", "packed"])
def test_reads__system_calls_that_all_fail_end_the_request_only(scenario, mode):
    result = scenario("spoilt_system_calls", mode=mode, inject=f"{READS}:error=EIO")
    before, during, after = outcomes(result)
    assert before == after == "identical"
    assert during.startswith("error: ")
    assert "Input/output error" in during


@pytest.mark.usefixtures("strace")
def test_reads__interrupted_and_slow_system_calls_change_nothing(scenario):
    inject = f"{READS}:delay_enter=50000:when=1+3"
    result = scenario("spoilt_system_calls", mode="on-demand", inject=inject)
    assert result["num_faults"] >= 2
    assert outcomes(result) == ["identical"] * 3
    assert result["during"]["stall_seconds"] > 0.05


@pytest.mark.parametrize("mode", ["packed", "tiers"])
def test_reads__an_error_once_is_read_again(scenario, disk, mode):
    result = spoilt(scenario, disk, mode, Rule("eio", times=2))
    assert result["num_faults"] == 2
    assert outcomes(result) == ["identical"] * 3


@pytest.mark.parametrize("mode", ["prefetch", "packed", "tiers"])
def test_reads__a_bad_disk_fails_one_request_and_names_the_place(scenario, disk, mode):
    result = spoilt(scenario, disk, mode, Rule("eio"))
    before, during, after = outcomes(result)
    assert before == after == "identical"
    for part in ("/model-0" if mode != "packed" else "/packed/", "Input/output error", " at "):
        assert part in during
    assert re.search(r"experts?.\d+", during)


@pytest.mark.parametrize("mode", ["prefetch", "packed"])
def test_reads__short_reads_are_read_on(scenario, disk, mode):
    result = spoilt(scenario, disk, mode, Rule("short"))
    assert result["num_faults"] > 10
    assert outcomes(result) == ["identical"] * 3


@pytest.mark.parametrize("mode", ["prefetch", "packed"])
def test_reads__a_truncated_shard_is_named_and_served_when_whole_again(scenario, disk, mode):
    result = spoilt(scenario, disk, mode, Rule("truncate", start=2000))
    before, during, after = outcomes(result)
    assert before == after == "identical"
    assert during.startswith("error: ")
    assert "truncated" in during


@pytest.mark.parametrize("mode", ["prefetch", "tiers"])
def test_reads__a_disk_of_50_ms_a_read_costs_time_only(scenario, disk, mode):
    result = spoilt(scenario, disk, mode, Rule("hang", seconds=0.05, times=40))
    assert outcomes(result) == ["identical"] * 3
    assert result["during"]["stall_seconds"] > 0.5


@pytest.mark.parametrize("mode", ["prefetch", "tiers"])
def test_reads__a_disk_that_freezes_for_a_time_ends_in_the_same_output(scenario, disk, mode):
    watched = {"watchdog_seconds": 0.3}
    result = spoilt(scenario, disk, mode, Rule("freeze"), system=watched, well_after_seconds=1.5)
    assert result["num_faults"] >= 1
    assert outcomes(result) == ["identical"] * 3


@pytest.mark.parametrize("mode", ["prefetch", "tiers"])
def test_reads__a_disk_slower_than_the_watchdog_is_late_not_dead(scenario, disk, mode):
    slow = Rule("hang", seconds=0.1, times=60)
    result = spoilt(scenario, disk, mode, slow, system={"watchdog_seconds": 0.06})
    assert result["num_faults"] >= 4
    assert outcomes(result) == ["identical"] * 3


@pytest.mark.usefixtures("disk")
def test_reads__a_disk_that_goes_and_comes_back_serves_again(scenario, tmp_path):
    result = scenario("disk_comes_back", folder=str(tmp_path / "again"))
    before, during, after = outcomes(result)
    assert before == after == "identical"
    assert during.startswith("error: ")


def test_reads__a_flipped_bit_of_a_packed_store_is_read_again(scenario, disk):
    result = spoilt(scenario, disk, "packed", Rule("flip", times=1))
    assert result["num_faults"] == 1
    assert outcomes(result) == ["identical"] * 3


def test_reads__a_flipped_bit_of_a_packed_store_is_an_error(scenario, disk):
    result = spoilt(scenario, disk, "packed", Rule("flip"))
    before, during, after = outcomes(result)
    assert before == after == "identical"
    assert re.match(r"error: .*\(layer \d+, expert \d+, chunk \d+\) are damaged", during)


def test_reads__a_flipped_bit_of_a_checkpoint_is_not_noticed(scenario, disk):
    """Safetensors has no checksum of its data. `moecast pack` adds some; the built-in
    model has digests that are checked when it is loaded."""
    result = spoilt(scenario, disk, "on-demand", Rule("flip"))
    assert outcomes(result)[:2] == ["identical", "wrong"]
