"""Packing on disks that fill up or fail, and in processes that are killed."""

import pytest

from tests.faults.conftest import mount_small_disk

pytestmark = pytest.mark.faults


def check_full(result: dict) -> None:
    assert (result["first"], result["verified"]) == ("packed: 48 written, 0 kept", "whole")
    assert result["during"].startswith("error: the disk is full")
    assert "make room and run the same command again" in result["during"]
    assert result["untouched"]
    assert result["after"].startswith("packed: ")


def test_packing__on_a_full_disk_keeps_the_store_and_resumes(scenario, tmp_path):
    # Room for two stores of 9 MiB and what packing keeps free.
    with mount_small_disk(tmp_path / "small", size="60m") as folder:
        result = scenario("packing_fills_the_disk", folder=str(folder), by="others")
    check_full(result)
    assert not result["after"].endswith(" 0 kept")


def test_packing__beyond_the_limit_of_a_file_leaves_the_store(scenario, tmp_path):
    check_full(scenario("packing_fills_the_disk", folder=str(tmp_path), by="limit"))


@pytest.mark.usefixtures("strace")
@pytest.mark.parametrize("inject", ["pwrite64:error=EIO:when=20", "fsync:error=EIO:when=1"])
def test_packing__on_a_disk_that_fails_leaves_the_store(scenario, tmp_path, inject):
    result = scenario("packing_fails_to_write", folder=str(tmp_path), inject=inject)
    assert result["num_faults"] == 1
    assert result["during"].startswith("error: ")
    assert "Input/output error" in result["during"]
    assert result["verified"] == result["verified_after"] == "whole"
    assert result["after"].startswith("packed: ")


@pytest.mark.usefixtures("strace")
def test_packing__killed_at_any_call_leaves_a_whole_store(scenario, tmp_path):
    result = scenario("packing_is_killed", folder=str(tmp_path), limit=400.0)
    assert result["kills"] > 20
    assert (result["not_whole"], result["verified"]) == ([], "whole")
    assert result["left"] == ["model", "store", "strace.log"]
