"""The compiled policy core and its Python files give the same answers to the same random calls."""

import json

import pytest

from runtime.compiled import VARIABLE, is_compiled
from runtime.policy.eviction import regret
from tests.builders.core_runs import runs
from tests.builders.processes import run_python

SEEDS = (0, 33)
"""Every eviction policy three times, with random systems, machines and routing."""


@pytest.fixture(scope="module")
def python() -> dict:
    """Results of the Python files; those of their loops where they are not compiled."""
    loops = [] if is_compiled() else ["--loops"]
    command = ("-m", "tests.builders.core_runs", *SEEDS, *loops)
    results = json.loads(run_python(*command, environment={VARIABLE: "0"}).stdout)
    assert results["is_python"]
    return results


def test_compiled_core__answers_as_the_python_files(python: dict) -> None:
    """Compiled, experts are looped over; in Python, NumPy's functions are called."""
    assert is_compiled() != regret.__file__.endswith(".py")
    assert (runs(*SEEDS) if is_compiled() else python["loops"]) == python["plain"]


def test_core__answers_the_same_where_experts_are_placed(python: dict) -> None:
    assert python["placed"] == python["plain"]
