"""A training that is killed anywhere and run again gives what it gives without interruption."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.builders.killed_trainings import POINTS, UNINTERRUPTED

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def digests(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, dict[str, str]]]:
    """Digests of the predictors' files, by entry, of a training killed at each point."""
    folder = tmp_path_factory.mktemp("killed")
    command = [sys.executable, "-m", "tests.builders.killed_trainings", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


@pytest.mark.parametrize("point", POINTS)
def test_train__killed_and_run_again_gives_the_same_entries(digests, point: str) -> None:
    assert digests[UNINTERRUPTED].keys() >= {"residual", "mlp", "stride", "reuse"}
    assert digests[point] == digests[UNINTERRUPTED]
