"""Threads that end, hang, or are interrupted."""

import pytest

pytestmark = pytest.mark.faults

MODES = ["prefetch", "tiers"]


DEATHS = [("prefetch", "idle"), ("prefetch", "bug"), ("on-demand", "reading"), ("tiers", "reading")]


@pytest.mark.parametrize(("mode", "how"), DEATHS)
def test_worker__a_dead_one_is_replaced_and_output_is_identical(scenario, mode, how):
    result = scenario("worker_killed", mode=mode, how=how)
    assert result["num_faults"] >= 1
    assert {result[when]["outcome"] for when in ("before", "during", "after")} == {"identical"}
    assert result["num_workers"] >= 1


@pytest.mark.parametrize("mode", MODES)
def test_worker__a_read_that_hangs_is_done_without(scenario, disk, mode):
    result = scenario("worker_hangs", disk=disk, mode=mode, close_early=False)
    assert result["num_faults"] == 1
    assert {result[when]["outcome"] for when in ("before", "during", "after")} == {"identical"}


def test_worker__a_model_closes_while_a_read_hangs(scenario, disk):
    assert scenario("worker_hangs", disk=disk, mode="prefetch", close_early=True)["num_faults"] == 1


READS = [("prefetch", 1), ("prefetch", 9), ("on-demand", 2), ("tiers", 2)]


@pytest.mark.parametrize(("mode", "read"), READS)
def test_interrupt__leaves_a_model_that_serves_every_thread(scenario, mode, read):
    result = scenario("interrupted", mode=mode, read=read)
    found = [result[when]["outcome"] for when in ("during", "after", "elsewhere")]
    assert found == ["interrupted", "identical", "identical"]


@pytest.mark.parametrize("mode", MODES)
def test_refusal__in_a_thread_that_ends_leaves_the_model_to_others(scenario, mode):
    result = scenario("refused_elsewhere", mode=mode)
    assert result["during"]["outcome"].startswith("error: injected")
    assert result["after"]["outcome"] == "identical"


@pytest.mark.parametrize("mode", MODES)
def test_interrupt__at_any_moment_leaves_a_model_that_serves(scenario, mode):
    result = scenario("interrupted_anywhere", mode=mode, seed=0, rounds=12)
    assert result["interrupted"] >= 6
    assert set(result["outcomes"]) == {"identical"}
    assert result["elsewhere"]["outcome"] == "identical"
