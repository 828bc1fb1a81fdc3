"""Run folders: one for each command, also where nothing can be written or nobody has a home."""

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import Mock

import pytest

from configs.cli import main
from configs.execution import make_run_dir, put_aside
from configs.program import run_program
from predictors.errors import MoecastError
from predictors.files import cache_folder, find_cache_folder
from tests.builders.commands import command_of
from tests.unit.configs.test_cli import refuses, works
from zoo.config import ListConfig
from zoo.load import local_zoos

RUNNING, GO = threading.Event(), threading.Event()


def waits(_: ListConfig) -> None:
    RUNNING.set()
    GO.wait(30)


COMMANDS = tuple(map(command_of, (works, waits, refuses)))


def test_make_run_dir__of_commands_that_start_together_is_one_for_each(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with ThreadPoolExecutor(16) as pool:
        folders = list(pool.map(lambda _: make_run_dir("works"), range(64)))
    assert len(set(folders)) == 64


def test_run_dir__that_a_command_uses_is_refused_to_others(tmp_path, capsys) -> None:
    first = threading.Thread(target=main, args=("zoo", COMMANDS, ["waits", f"run_dir={tmp_path}"]))
    first.start()
    assert RUNNING.wait(30)
    assert main("zoo", COMMANDS, ["works", f"run_dir={tmp_path}"]) == 2
    assert "another command runs in this folder" in capsys.readouterr().err
    assert json.loads((tmp_path / "run.json").read_text())["command"] == "zoo-waits"
    GO.set()
    first.join()
    assert main("zoo", COMMANDS, ["works", f"run_dir={tmp_path}"]) == 0


def test_results__are_of_the_run_in_whose_folder_they_are(tmp_path: Path) -> None:
    for zoo in "ab":
        assert main("zoo", COMMANDS, ["works", f"zoo={zoo}", f"run_dir={tmp_path}"]) == 0
    assert main("zoo", COMMANDS, ["refuses", "zoo=c", f"run_dir={tmp_path}"]) == 2
    assert json.loads((tmp_path / "results.json").read_text())["zoo"] == "b"
    assert json.loads((tmp_path / "run.json").read_text())["config"]["zoo"] == "b"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["results.json", "run.json"]
    # A kill leaves a record without results.
    with put_aside(tmp_path, {"command": "zoo-works", "config": {"zoo": "c"}}):
        assert not (tmp_path / "results.json").exists()
        (tmp_path / "run.json").write_text("{}")


@pytest.mark.parametrize("has_results", [False, True])
def test_run__in_the_folder_of_a_killed_one_restores_what_it_put_aside(has_results, tmp_path):
    assert main("zoo", COMMANDS, ["works", "zoo=a", f"run_dir={tmp_path}"]) == 0
    for name in ("run.json", "results.json"):
        (tmp_path / name).rename(tmp_path / f".{name}.earlier")
    (tmp_path / "run.json").write_text('{"config": {"zoo": "b"}}')
    if has_results:
        (tmp_path / "results.json").write_text('{"zoo": "b"}')
    assert main("zoo", COMMANDS, ["refuses", "zoo=c", f"run_dir={tmp_path}"]) == 2
    left = "b" if has_results else "a"
    assert json.loads((tmp_path / "results.json").read_text())["zoo"] == left
    assert json.loads((tmp_path / "run.json").read_text())["config"]["zoo"] == left
    assert sorted(path.name for path in tmp_path.iterdir()) == ["results.json", "run.json"]


@pytest.mark.parametrize("needed", [False, True])
def test_run__where_nothing_can_be_written(needed, monkeypatch, capsys) -> None:
    monkeypatch.chdir("/proc")
    code = main("zoo", [command_of(works, needs_run=needed)], ["works"])
    line = capsys.readouterr().err
    assert line.startswith("error: the current folder cannot be written to (" if needed else "")
    assert ("run_dir=PATH" in line) == needed
    assert code == (2 if needed else 0)


def test_cache_folder__without_a_home_names_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    """A user id of a container: no account, and no HOME."""
    for variable in ("HOME", "MOECAST_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr("pwd.getpwuid", Mock(side_effect=KeyError("getpwuid(): uid not found")))
    assert find_cache_folder("zoo") is None
    assert [Path(zoo.storage.address).name for zoo in local_zoos()] == ["builtin"]
    with pytest.raises(MoecastError, match="Set HOME or MOECAST_CACHE to a folder"):
        cache_folder("zoo")
    monkeypatch.setenv("MOECAST_CACHE", "/cache")
    assert cache_folder("zoo") == Path("/cache/zoo")


def test_cache_folder__that_cannot_be_written_names_the_variable(monkeypatch, capsys) -> None:
    monkeypatch.setenv("MOECAST_CACHE", "/proc/home/moecast")
    monkeypatch.chdir("/proc")
    assert run_program("zoo", ["pull", "qwen2-moe-tiny/stride", "zoo=builtin"]) == 2
    assert "MOECAST_CACHE=/proc/home/moecast: /proc/home" in capsys.readouterr().err
