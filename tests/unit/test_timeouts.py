"""A test that hangs is ended, and says where each of its threads was."""

import subprocess
import sys
from pathlib import Path

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

NO_LIMIT = """
import pytest

@pytest.mark.timeout(0)
def test_without_a_limit():
    pass
"""


def run_pytest(folder, content, *arguments):
    file = folder / "test_it.py"
    file.write_text(content)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-c", "pyproject.toml"]
    result = subprocess.run(
        [*command, "-p", "tests.conftest", *arguments, str(file)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    return result.returncode, result.stdout + result.stderr


def test_timeout__shows_the_stacks_of_all_threads(tmp_path):
    code, output = run_pytest(tmp_path, HANGS, "--timeout=5")
    assert code != 0
    assert "Timeout" in output
    assert "in test_deadlock__of_two_locks" in output
    assert "in other_thread" in output


def test_timeout__a_test_without_one_is_refused(tmp_path):
    code, output = run_pytest(tmp_path, NO_LIMIT)
    assert code != 0
    assert "a test without a limit may hang" in output
