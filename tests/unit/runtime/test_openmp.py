"""The wait policy of OpenMP's threads."""

import os
import subprocess
import sys

import pytest

import moecast
from collect.launch.worker import UnitWorker
from configs.program import run_program
from runtime.openmp import WAIT_POLICY


@pytest.mark.parametrize(("own", "expected"), [(None, "passive"), ("active", "active")])
def test_main__lets_waiting_threads_sleep_unless_the_user_decides(
    own: str | None, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(WAIT_POLICY, raising=False)
    if own is not None:
        monkeypatch.setenv(WAIT_POLICY, own)
    assert run_program("runtime", ["generate", "--help"]) == 0
    assert os.environ[WAIT_POLICY] == expected


def test_worker__lets_waiting_threads_sleep(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(WAIT_POLICY, raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    UnitWorker("json:dumps", '{"obj": 1}', threads=1).open()
    assert os.environ[WAIT_POLICY] == "passive"


def test_moecast__load_lets_waiting_threads_sleep(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(WAIT_POLICY, raising=False)
    assert callable(moecast.load)
    assert os.environ[WAIT_POLICY] == "passive"


def test_command_line__is_read_before_openmp_starts() -> None:
    script = (
        "import os, sys\n"
        "import configs.cli, configs.commands, configs.program, moecast.command\n"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["False"]
