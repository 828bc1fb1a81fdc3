"""The command `moecast`: dispatch, help and version, without slow imports."""

import json
import sys

import pytest

from configs.commands import PROGRAMS
from moecast import __version__, command
from tests.builders.processes import run_python

LIGHT = """
import json, sys
before = set(sys.modules)
import moecast
from moecast.command import main
assert main(["--version"]) == main(["--help"]) == 0
print(json.dumps(sorted({name.split(".")[0] for name in set(sys.modules) - before})))
"""


def test_first_answers__import_the_standard_library_only() -> None:
    version, *_, imported = run_python("-c", LIGHT).stdout.splitlines()
    assert version == f"moecast {__version__}"
    ours = {"moecast", "configs", "predictors", "zoo", "runtime"}
    assert set(json.loads(imported)) <= ours | {*sys.stdlib_module_names}


def test_help__lists_every_command_of_the_programs(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--help"]) == 0
    text = capsys.readouterr().out
    listed = {name: row for rows in command.COMMANDS.values() for name, row in rows.items()}
    assert {entry.name for entry in PROGRAMS["runtime"]} <= set(listed)
    assert {program for program, _ in listed.values()} == set(PROGRAMS) - {"train.reference"}
    assert all(f"\n  {name} " in text for name in listed)


USAGES = [
    (["serve", "--help"], "usage: moecast serve "),
    (["train", "reuse", "--help"], "usage: moecast train reuse "),
    (["zoo", "pull", "--help"], "usage: moecast zoo pull "),
]


@pytest.mark.parametrize(("arguments", "usage"), USAGES)
def test_usage__names_the_command_as_it_was_called(arguments, usage, capsys) -> None:
    assert command.main(arguments) == 0
    assert capsys.readouterr().out.startswith(usage)


def test_unknown_command__is_refused_with_the_closest(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["srve"]) == 2
    assert "unknown command 'srve'. Did you mean 'serve'?" in capsys.readouterr().err


def test_no_command__prints_the_help_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main([]) == 2
    assert capsys.readouterr().err == command.write_help()
