"""Errors about a path name the option that it is from."""

import errno
import os
from pathlib import Path

import pytest

from configs.cli import main
from configs.execution import explain_path_error
from tests.builders.commands import command_of
from zoo.config import ListConfig


def reads(config: ListConfig) -> None:
    Path(str(config.zoo)).read_text()


UNREADABLE = [
    ("folder", "Is a directory"),
    ("file/below", "Not a directory"),
    ("none", "No such file or directory"),
    ("a" * 300, "File name too long"),
    ("loop", "Too many levels of symbolic links"),
]


@pytest.mark.parametrize(("name", "reason"), UNREADABLE)
def test_path__that_cannot_be_read_names_its_option(name, reason, tmp_path, capsys) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("")
    (tmp_path / "loop").symlink_to("loop")
    path = tmp_path / name
    given = ["reads", f"zoo={path}", f"run_dir={tmp_path / 'r'}"]
    assert main("zoo", [command_of(reads)], given) == 2
    assert capsys.readouterr().err == f"error: zoo={path}: {path}: {reason}\n"


@pytest.mark.parametrize("run_dir", ["file", "file/below", "/proc/none"])
def test_run_dir__that_cannot_be_written_is_named(run_dir, tmp_path, capsys) -> None:
    (tmp_path / "file").write_text("")
    folder = tmp_path / run_dir
    assert main("zoo", [command_of(reads)], ["reads", "zoo=x", f"run_dir={folder}"]) == 2
    assert capsys.readouterr().err.startswith(f"error: run_dir={folder}: ")


def test_failure_of_the_machine__is_no_error_of_the_user() -> None:
    error = OSError(errno.EIO, os.strerror(errno.EIO), "/x")
    assert explain_path_error(error, [("zoo", "/x")]) is None
    assert explain_path_error(OSError("no disk"), []) is None
