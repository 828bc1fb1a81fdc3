"""The compiled policy core and its Python files give the same answers to the same random calls."""

import json
from typing import Any

import pytest

from runtime.compiled import VARIABLE, is_compiled
from tests.builders.processes import run_python

SEEDS = range(44)
"""Every eviction policy four times, with random systems, machines and routing."""


def run_core(*options: str, compiled: bool = False) -> dict[str, Any]:
    command = ("-m", "tests.builders.core_runs", SEEDS.start, SEEDS.stop, *options)
    done = run_python(*command, environment={VARIABLE: "1" if compiled else "0"})
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def reference() -> dict[str, Any]:
    results = run_core()
    assert results["is_python"]
    return results


def test_compiled_core__answers_as_the_python_files(reference: dict[str, Any]) -> None:
    if not is_compiled():
        pytest.skip("NO COMPILED CORE: its Python files are tested alone")
    results = run_core(compiled=True)
    assert not results["is_python"]
    assert results["results"] == reference["results"]


@pytest.mark.parametrize("option", ["--loops", "--placed"])
def test_core__answers_the_same_in_its_other_ways(reference: dict[str, Any], option: str) -> None:
    results = run_core(option)
    assert results["is_python"]
    assert results["results"] == reference["results"]
