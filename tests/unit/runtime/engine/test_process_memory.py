"""Memory limits and peaks."""

import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from runtime.engine.memory import available_memory_bytes

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize(("limit", "used", "left"), [("1000", "400", 600), ("1000", "1200", 0)])
def test_available__is_what_the_container_leaves(tmp_path, limit, used, left):
    (tmp_path / "memory.max").write_text(f"{limit}\n")
    (tmp_path / "memory.current").write_text(f"{used}\n")
    assert available_memory_bytes(tmp_path) == left


def test_available__without_limit_is_the_machines(tmp_path):
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("400\n")
    for cgroup in (tmp_path, tmp_path / "none"):
        assert 0 < available_memory_bytes(cgroup) <= psutil.virtual_memory().total


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="ru_maxrss crosses exec on Linux")
def test_peak__excludes_the_parent_process():
    held = bytearray(300 * 2**20)
    held[::4096] = b"x" * len(held[::4096])
    code = "from runtime.engine.memory import peak_memory_bytes; print(peak_memory_bytes())"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert int(done.stdout) < 200 * 2**20 < len(held)
