"""Retries: every unit is done once or given up, whatever fails and whichever worker dies."""

import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from collect.config import LauncherConfig
from collect.errors import LaunchError
from collect.launch import pool as pools
from collect.launch.pool import WorkerPool
from collect.launch.processes import UnitResult


class ScriptedEngine:
    """Units fail, lose their worker (and the rest of its share) or are done, as scripted."""

    logs = "logs"

    def __init__(self, scripts: dict[str, list[str]], *, seed: int = 0):
        self._scripts = {unit: iter(words) for unit, words in scripts.items()}
        self._chance = random.Random(seed)
        self.done: list[str] = []
        self.closed = False

    def run(self, units: Sequence[str]) -> Iterator[UnitResult]:
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


def make_pool(engine: ScriptedEngine, retries: int, *, say=lambda _: None) -> WorkerPool:
    config = LauncherConfig(workers=2, retries=retries)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pools, "start_engine", lambda *_: engine)
        return WorkerPool(config, "m:f", {}, logs=Path("logs"), say=say)


words = st.lists(st.sampled_from(["fails", "done"]), max_size=5)
scripts = st.dictionaries(st.sampled_from([f"u{i}" for i in range(8)]), words, max_size=8)


@given(scripts, st.integers(0, 3), st.integers(0, 99))
def test_pool__every_unit_is_done_once_or_given_up(script, retries, seed) -> None:
    engine = ScriptedEngine(script, seed=seed)
    tried = {unit: said[: retries + 1] for unit, said in script.items() if len(said) > retries}
    given_up = {unit for unit, said in tried.items() if "done" not in said}
    advanced: list[str] = []
    with make_pool(engine, retries) as pool:
        if given_up:
            with pytest.raises(LaunchError, match=f"^{len(given_up)} of {len(script)} units"):
                pool.run(list(script), advance=advanced.append)
        else:
            values = pool.run(list(script), advance=advanced.append)
            assert values == {unit: f"result of {unit}" for unit in script}
    assert engine.closed
    assert advanced == engine.done
    assert sorted(engine.done) == sorted(set(script) - given_up)


@given(st.integers(0, 3), st.integers(0, 99))
def test_pool__a_unit_that_kills_its_worker_costs_no_other(retries: int, seed: int) -> None:
    script = {"kills": ["dies"] * 9} | {f"u{i}": [] for i in range(8)}
    engine = ScriptedEngine(script, seed=seed)
    reason = "^1 of 9 units failed.* kills: kills!"
    with make_pool(engine, retries) as pool, pytest.raises(LaunchError, match=reason):
        pool.run(list(script))
    assert sorted(engine.done) == sorted(set(script) - {"kills"})


def test_pool__reports_unit_and_logs_of_a_failure() -> None:
    engine = ScriptedEngine({"a": ["fails"] * 9, "b": [], "c": []})
    lines: list[str] = []
    reason = r"1 of 3 units failed, the others are done\. a: a!; logs"
    with make_pool(engine, 1, say=lines.append) as pool, pytest.raises(LaunchError, match=reason):
        pool.run(["a", "b", "c"])
    assert lines == ["a is tried again: a!; logs: logs", "a is given up: a!; logs: logs"]
    assert set(engine.done) == {"b", "c"}
    assert pool.counts == {"units": 3, "retried": 1}


def test_pool__gives_up_when_no_worker_reports_anything() -> None:
    engine = ScriptedEngine({})
    engine.run = lambda _units: iter(())
    reason = "a: no worker came to it"
    with make_pool(engine, retries=2) as pool, pytest.raises(LaunchError, match=reason):
        pool.run(["a"])
