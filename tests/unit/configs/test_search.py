"""Searches: `-m` with intervals, which Optuna draws from, in a folder that several share."""

import json
import multiprocessing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

from configs.cli import main
from configs.command import Command
from configs.errors import ConfigError
from configs.search import (
    SearchSettings,
    ask,
    is_interval,
    lock_path,
    open_study,
    read_axis,
    read_objective,
    read_settings,
    search,
)
from zoo.config import ListConfig

AXES = {"x": FloatDistribution(-1.0, 1.0), "kind": CategoricalDistribution(["a", "b"])}
SETTINGS = SearchSettings(trials=12, objective="value")


def run(options: Mapping[str, Any], folder: Path) -> dict[str, float]:
    folder.mkdir()
    return {"value": (options["kind"] == "b") - options["x"] ** 2}


def list_entries(config: ListConfig) -> dict[str, Any]:
    """A command for the tests: the larger the better, to .75."""
    assert config.least is not None
    return {"nested": {"value": -((config.least - 0.75) ** 2)}, "seed": config.seed}


COMMANDS = (
    Command(
        name="find",
        config="zoo_list",
        run=f"{__name__}:list_entries",
        summary="Test.",
        objective="nested.value",
    ),
)


def test_search__finds_the_best_and_returns_all_trials_best_first(tmp_path: Path) -> None:
    trials = search(AXES, SETTINGS, folder=tmp_path, run=run)
    assert sorted(one.number for one in trials) == list(range(12))
    assert [one.objective for one in trials] == sorted(
        (one.objective for one in trials), reverse=True
    )
    assert trials[0].options["kind"] == "b"
    for one in trials:
        assert one.objective == (one.options["kind"] == "b") - one.options["x"] ** 2


def test_search__continues_after_a_failure_and_repeats_nothing(tmp_path: Path) -> None:
    calls: list[Path] = []

    def fails_at_the_fifth(options: Mapping[str, Any], folder: Path) -> dict[str, float]:
        calls.append(folder)
        if len(calls) == 5:
            raise RuntimeError("no memory")
        return run(options, folder)

    with pytest.raises(RuntimeError, match="no memory"):
        search(AXES, SETTINGS, folder=tmp_path, run=fails_at_the_fifth)
    trials = search(AXES, SETTINGS, folder=tmp_path, run=fails_at_the_fifth)
    assert len(trials) == 12
    assert len(calls) == len(set(calls)) == 13
    assert search(AXES, SETTINGS, folder=tmp_path, run=fails_at_the_fifth) == trials
    assert len(calls) == 13


def test_search__replaces_the_trial_of_a_killed_process(tmp_path: Path) -> None:
    study = open_study(AXES, SETTINGS, tmp_path)
    study.ask(dict(AXES))  # and never told
    trials = search(AXES, SETTINGS, folder=tmp_path, run=run)
    assert sorted(one.number for one in trials) == list(range(1, 13))


def test_search__counts_the_trials_of_processes_that_run(tmp_path: Path) -> None:
    study = open_study(AXES, SETTINGS, tmp_path)
    number = study.ask(dict(AXES)).number
    with FileLock(lock_path(tmp_path, number)):
        few = SearchSettings(trials=1, objective="value")
        assert ask(study, AXES, few, tmp_path) is None


def run_search(folder: Path) -> None:
    search(AXES, SETTINGS, folder=folder, run=run)


def test_search__is_shared_by_processes(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=run_search, args=(tmp_path,)) for _ in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(200)
    assert [process.exitcode for process in processes] == [0, 0]
    # Nothing is left to do.
    assert len(search(AXES, SETTINGS, folder=tmp_path, run=run)) == 12


def test_search__refuses_the_folder_of_another_search(tmp_path: Path) -> None:
    search(AXES, SearchSettings(trials=1, objective="value"), folder=tmp_path, run=run)
    other = {"x": FloatDistribution(0.0, 2.0)}
    with pytest.raises(ConfigError, match="has a search of other options"):
        search(other, SETTINGS, folder=tmp_path, run=run)


@pytest.mark.parametrize(
    ("argument", "kind", "axis"),
    [
        ("width=interval(8,64)", int, IntDistribution(8, 64)),
        ("width=tag(log,interval(8,64))", int, IntDistribution(8, 64, log=True)),
        ("lr=tag(log,interval(1e-4,1e-2))", float, FloatDistribution(1e-4, 1e-2, log=True)),
        ("loss=bce,listwise", str, CategoricalDistribution(["bce", "listwise"])),
        ("width=range(1,4)", int, CategoricalDistribution(["1", "2", "3"])),
        ("seed=3", int, None),
    ],
)
def test_axis__follows_the_grammar_of_hydra(argument, kind, axis) -> None:
    assert read_axis(argument, kind) == axis
    assert is_interval(argument) == ("interval" in argument)


@pytest.mark.parametrize(
    "argument", ["lr=interval(2,1)", "lr=interval(1,1)", "lr=tag(log,interval(0,1))"]
)
def test_axis__without_values_is_refused(argument) -> None:
    with pytest.raises(ConfigError, match="interval"):
        read_axis(argument, float)


def test_settings__name_what_is_wrong() -> None:
    for own, message in (
        ({"trial": "3"}, "sweep.trial: a search has sweep.trials"),
        ({"trials": "many"}, "must be a whole number"),
        ({"trials": "0"}, "must be at least 1"),
    ):
        with pytest.raises(ConfigError, match=message):
            read_settings(own, objective="value")
    with pytest.raises(ConfigError, match=r"sweep.objective=a.b: results.json has no such number"):
        read_objective({"a": {"c": 1}}, "a.b")


def test_command__searches_and_records_the_trials(tmp_path: Path) -> None:
    options = ["find", "-m", "least=interval(0,1)", "metric=a,b", "sweep.trials=5", "seed=4"]
    assert main("zoo", COMMANDS, [*options, f"run_dir={tmp_path}"]) == 0
    record = json.loads((tmp_path / "sweep.json").read_text())
    assert record["objective"] == "nested.value"
    assert len(record["trials"]) == 5
    best = record["trials"][0]
    results = json.loads((tmp_path / f"{best['number']}/results.json").read_text())
    assert results == {"nested": {"value": best["objective"]}, "seed": 4}


def test_command__bad_searches_are_one_line(tmp_path: Path, capsys) -> None:
    run_dir = f"run_dir={tmp_path}"
    for options, message in (
        (["sweep.trials=3", "metric=a"], "a search needs an option to vary"),
        (["least=interval(1,0)"], "the interval has no values"),
        (["lest=interval(0,1)"], "lest"),
        (["least=interval(0,1)", "sweep.objective=seat"], "results.json has no such number"),
    ):
        assert main("zoo", COMMANDS, ["find", "-m", *options, run_dir]) == 2
        assert message in capsys.readouterr().err.splitlines()[-1]
