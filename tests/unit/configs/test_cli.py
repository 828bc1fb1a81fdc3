"""The one error boundary: exit codes, one line, records of a run."""

import atexit
import json
import os
from dataclasses import replace

import pytest

from configs.cli import main
from predictors.errors import MoecastError
from tests.builders.commands import command_of
from tests.builders.processes import run_python
from zoo.config import ListConfig

WRITE = "write key=value; --help lists the options"
CHOICES = "Choices: exhausts, fails, imports, refuses, waits, works"
EXHAUSTED = "no memory is left, of the machine or within a limit (ulimit -v, a container)"


def works(config: ListConfig) -> dict:
    return {"zoo": config.zoo, "seed": config.seed}


def fails(config: ListConfig) -> None:
    raise OSError(f"no disk\nfor {config.zoo}")


def exhausts(_: ListConfig) -> None:
    raise MemoryError


def refuses(_: ListConfig) -> None:
    raise MoecastError("this cannot be; do that")


def waits(_: ListConfig) -> None:
    raise KeyboardInterrupt


def imports(_: ListConfig) -> None:
    """As a module that is imported on demand ends at Ctrl-C."""
    try:
        raise KeyboardInterrupt
    except BaseException as error:
        raise ModuleNotFoundError("could not import PreTrainedModel") from error


class CrashesAtExit(MoecastError):
    ends_process = True


def crashes(_: ListConfig) -> None:
    atexit.register(os.abort)
    raise CrashesAtExit("the cluster is lost; start it again")


RUNS = (works, fails, exhausts, refuses, waits, imports)
COMMANDS = tuple(command_of(run, positional=("zoo",)) for run in RUNS)


def test_run__writes_its_record_and_results(tmp_path) -> None:
    arguments = ["works", "some where", "seed=3", f"run_dir={tmp_path / 'r'}"]
    assert main("zoo", COMMANDS, arguments) == 0
    assert json.loads((tmp_path / "r/results.json").read_text()) == {"zoo": "some where", "seed": 3}
    record = json.loads((tmp_path / "r/run.json").read_text())
    assert (record["argv"], record["seed"]) == (arguments[1:], 3)
    assert record["config"]["zoo"] == "some where"
    assert record["versions"]["numpy"]
    assert sorted(path.name for path in (tmp_path / "r").iterdir()) == ["results.json", "run.json"]


def test_run__without_a_folder_makes_one_if_it_needs_one(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main("zoo", COMMANDS, ["works"]) == 0
    assert not list(tmp_path.iterdir())
    needs = [replace(command, needs_run=True) for command in COMMANDS]
    assert main("zoo", needs, ["works"]) == 0
    assert main("zoo", needs, ["works"]) == 0
    assert len(list(tmp_path.glob("runs/zoo-works/*/results.json"))) == 2


def test_error__that_ends_the_process_keeps_its_exit_code(tmp_path) -> None:
    """What crashes in Python's teardown does not run."""
    code = f"""
import sys
from configs.cli import main
from tests.builders.commands import command_of
from tests.unit.configs.test_cli import crashes
sys.exit(main("zoo", [command_of(crashes)], ["crashes", "run_dir={tmp_path / "r"}"]))
"""
    done = run_python("-c", code, check=False)
    assert (done.stderr, done.returncode) == ("error: the cluster is lost; start it again\n", 2)


def test_check__refuses_before_the_run_is_imported(tmp_path, capsys) -> None:
    command = replace(command_of(works), run="no.such.module:run", check=f"{__name__}:refuses")
    assert main("zoo", [command], ["works", f"run_dir={tmp_path / 'r'}"]) == 2
    assert capsys.readouterr().err == "error: this cannot be; do that\n"
    assert not (tmp_path / "r").exists()


ONE_LINE = [
    (["fails", "x"], 1, "error: OSError: no disk for x (debug=true shows the traceback)"),
    (["exhausts"], 1, f"error: MemoryError: {EXHAUSTED} (debug=true shows the traceback)"),
    (["refuses"], 2, "error: this cannot be; do that"),
    (["imports"], 130, "interrupted; to run it again: python -m zoo imports"),
    (["waits", "a b"], 130, "interrupted; to run it again: python -m zoo waits 'a b'"),
    (["works", "x", "y"], 2, f"error: 'y' is not an option: {WRITE}"),
    (["works", "-fast"], 2, f"error: '-fast' is not an option: {WRITE}"),
    (["works", "--fast"], 2, "error: unknown option 'fast'. --help lists the options"),
    (["wroks"], 2, f"error: unknown command 'wroks'. Did you mean 'works'? {CHOICES}"),
]


@pytest.mark.parametrize(("arguments", "code", "line"), ONE_LINE)
def test_main__writes_one_line_and_returns_the_exit_code(
    arguments, code, line, tmp_path, monkeypatch, capsys
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main("zoo", COMMANDS, arguments) == code
    assert capsys.readouterr().err == f"{line}\n"


def test_debug__shows_the_traceback(tmp_path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main("zoo", COMMANDS, ["fails", "debug=true", f"run_dir={tmp_path}"]) == 1
    assert "Traceback" in capsys.readouterr().err


def test_sweep__runs_the_grid_in_numbered_folders(tmp_path) -> None:
    assert main("zoo", COMMANDS, ["works", "-m", "seed=1,2", "zoo=a,b", f"run_dir={tmp_path}"]) == 0
    record = json.loads((tmp_path / "sweep.json").read_text())
    expected = [{"zoo": zoo, "seed": seed} for seed in (1, 2) for zoo in "ab"]
    assert [one["results"] for one in record] == expected
    assert json.loads((tmp_path / "3/results.json").read_text()) == {"zoo": "b", "seed": 2}
