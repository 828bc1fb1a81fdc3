"""The wait policy of OpenMP's threads."""

import os
from collections.abc import Callable

import pytest

import moecast
from collect.launch.processes import UnitWorker
from configs.program import run_program
from runtime.openmp import WAIT_POLICY


@pytest.mark.parametrize(
    "begin",
    [
        lambda: run_program("runtime", ["generate", "--help"]),
        lambda: UnitWorker("json:dumps", '{"obj": 1}', threads=1).open(),
        lambda: moecast.load,
    ],
    ids=["command", "worker", "load"],
)
def test_start__lets_waiting_threads_sleep_unless_the_user_decides(
    begin: Callable[[], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.delenv(WAIT_POLICY, raising=False)
    begin()
    assert os.environ[WAIT_POLICY] == "passive"
    monkeypatch.setenv(WAIT_POLICY, "active")
    begin()
    assert os.environ[WAIT_POLICY] == "active"
