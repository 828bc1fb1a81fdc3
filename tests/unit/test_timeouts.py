"""A test that hangs is ended, and says where each of its threads was."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import pytest_collection_modifyitems

ROOT = Path(__file__).parents[2]

HANGS = """
import threading

def other_thread(one, two):
    with two:
        started.set()
        with one:
            pass

started = threading.Event()

def test_deadlock__of_two_locks():
    one, two = threading.Lock(), threading.Lock()
    with one:
        threading.Thread(target=other_thread, args=(one, two), daemon=True).start()
        started.wait()
        with two:
            pass
"""


def test_timeout__shows_the_stacks_of_all_threads(tmp_path):
    file = tmp_path / "test_it.py"
    file.write_text(HANGS)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-c", "pyproject.toml"]
    done = subprocess.run(
        [*command, "-p", "tests.conftest", "--timeout=2", str(file)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    output = done.stdout + done.stderr
    assert done.returncode != 0
    assert "Timeout" in output
    assert "in test_deadlock__of_two_locks" in output
    assert "in other_thread" in output


def test_timeout__a_test_without_one_is_refused(request):
    request.applymarker(pytest.mark.timeout(0))
    with pytest.raises(AssertionError, match="a test without a limit may hang"):
        pytest_collection_modifyitems(request.config, [request.node])
