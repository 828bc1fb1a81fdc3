"""A training that is killed anywhere and run again gives what it gives without interruption."""

import json
from pathlib import Path

from tests.builders.processes import run_python


def test_train__killed_and_run_again_gives_the_same_entries(tmp_path: Path) -> None:
    done = run_python("-m", "tests.builders.killed_trainings", tmp_path)
    uninterrupted, killed = json.loads(done.stdout)
    assert uninterrupted.keys() >= {"residual", "mlp", "stride", "reuse"}
    assert killed == uninterrupted
