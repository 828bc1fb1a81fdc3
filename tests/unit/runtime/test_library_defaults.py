"""Defaults of the libraries that PyTorch computes with."""

import os

import pytest

import moecast
from collect.launch.processes import UnitWorker
from configs.program import run_program
from runtime.library_defaults import DEFAULTS

BEGINNINGS = {
    "command": lambda: run_program("runtime", ["generate", "--help"]),
    "worker": lambda: UnitWorker("json:dumps", {"obj": 1}, threads=1).open(),
    "load": lambda: moecast.load,
}


@pytest.mark.parametrize("begin", BEGINNINGS.values(), ids=BEGINNINGS)
def test_start__sets_defaults_unless_the_user_decides(begin, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    for name in DEFAULTS:
        monkeypatch.delenv(name, raising=False)
    begin()
    assert {name: os.environ[name] for name in DEFAULTS} == DEFAULTS
    for name in DEFAULTS:
        monkeypatch.setenv(name, "7")
    begin()
    assert {os.environ[name] for name in DEFAULTS} == {"7"}
