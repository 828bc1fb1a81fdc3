"""Retries: every unit is done once or given up, whatever fails and whichever worker dies."""

import random
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from collect.config import LauncherConfig
from collect.errors import LaunchError
from collect.launch.processes import UnitResult, WorkerPool


class ScriptedPool(WorkerPool):
    """Units fail, lose their worker (and the rest of its share) or are done, as scripted."""

    logs = "logs"

    def __init__(
        self, scripts: dict[str, list[str]], retries: int, *, seed: int = 0, say=lambda _: None
    ):
        super().__init__(LauncherConfig(workers=2, retries=retries), say)
        self._scripts = {unit: iter(words) for unit, words in scripts.items()}
        self._chance = random.Random(seed)
        self.done: list[str] = []
        self.closed = False

    def attempt(self, units: Sequence[str]) -> Iterator[UnitResult]:
        for unit in self._chance.sample(units, len(units)):
            word = next(self._scripts[unit], "done")
            if word == "done":
                self.done.append(unit)
                yield UnitResult(unit=unit, value=f"result of {unit}")
            else:
                yield UnitResult(unit=unit, error=f"{unit}!")
            if word == "dies":
                return  # Units behind it in a job's share have no result.

    def close(self) -> None:
        self.closed = True


words = st.lists(st.sampled_from(["fails", "done"]), max_size=5)
scripts = st.dictionaries(st.sampled_from([f"u{i}" for i in range(8)]), words, max_size=8)


@given(scripts, st.integers(0, 3), st.integers(0, 99))
def test_pool__every_unit_is_done_once_or_given_up(script, retries, seed) -> None:
    pool = ScriptedPool(script, retries, seed=seed)
    tried = {unit: said[: retries + 1] for unit, said in script.items() if len(said) > retries}
    given_up = {unit for unit, said in tried.items() if "done" not in said}
    advanced: list[str] = []
    with pool:
        if given_up:
            with pytest.raises(LaunchError, match=f"^{len(given_up)} of {len(script)} units"):
                pool.run(list(script), advance=advanced.append)
        else:
            values = pool.run(list(script), advance=advanced.append)
            assert values == {unit: f"result of {unit}" for unit in script}
    assert pool.closed
    assert advanced == pool.done
    assert sorted(pool.done) == sorted(set(script) - given_up)


@given(st.integers(0, 3), st.integers(0, 99))
def test_pool__a_unit_that_kills_its_worker_costs_no_other(retries: int, seed: int) -> None:
    script = {"kills": ["dies"] * 9} | {f"u{i}": [] for i in range(8)}
    pool = ScriptedPool(script, retries, seed=seed)
    reason = "^1 of 9 units failed.* kills: kills!"
    with pool, pytest.raises(LaunchError, match=reason):
        pool.run(list(script))
    assert sorted(pool.done) == sorted(set(script) - {"kills"})


def test_pool__reports_unit_and_logs_of_a_failure() -> None:
    lines: list[str] = []
    script = {"a": ["fails"] * 9, "b": [], "c": []}
    pool = ScriptedPool(script, 1, say=lines.append)
    reason = r"1 of 3 units failed, the others are done\. a: a!; logs"
    with pool, pytest.raises(LaunchError, match=reason):
        pool.run(["a", "b", "c"])
    assert lines == ["a is tried again: a!; logs: logs", "a is given up: a!; logs: logs"]
    assert set(pool.done) == {"b", "c"}
    assert pool.counts == {"units": 3, "retried": 1}


def test_pool__gives_up_when_no_worker_reports_anything() -> None:
    pool = ScriptedPool({}, retries=2)
    pool.attempt = lambda _units: iter(())
    reason = "a: no worker came to it"
    with pool, pytest.raises(LaunchError, match=reason):
        pool.run(["a"])
