"""A training that is killed anywhere and run again gives what it gives without interruption."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_train__killed_and_run_again_gives_the_same_entries(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.builders.killed_trainings", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    uninterrupted, killed = json.loads(done.stdout)
    assert uninterrupted.keys() >= {"residual", "mlp", "stride", "reuse"}
    assert killed == uninterrupted
