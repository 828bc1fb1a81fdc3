"""The wait policy of OpenMP's threads."""

import os

import pytest

import moecast
from collect.launch.processes import UnitWorker
from configs.program import run_program
from runtime.openmp import WAIT_POLICY

BEGINNINGS = {
    "command": lambda: run_program("runtime", ["generate", "--help"]),
    "worker": lambda: UnitWorker("json:dumps", '{"obj": 1}', threads=1).open(),
    "load": lambda: moecast.load,
}


@pytest.mark.parametrize("begin", BEGINNINGS.values(), ids=BEGINNINGS)
def test_start__lets_waiting_threads_sleep_unless_the_user_decides(begin, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.delenv(WAIT_POLICY, raising=False)
    begin()
    assert os.environ[WAIT_POLICY] == "passive"
    monkeypatch.setenv(WAIT_POLICY, "active")
    begin()
    assert os.environ[WAIT_POLICY] == "active"
