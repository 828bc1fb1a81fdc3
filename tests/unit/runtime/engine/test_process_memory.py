"""Memory limits and peaks."""

import resource
import sys
from pathlib import Path

import psutil
import pytest

from runtime.engine.memory import available_memory_bytes
from tests.builders.processes import run_python

V2 = ("memory.max", "memory.current", "inactive_file")
V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def write_group(folder: Path, files: tuple[str, str, str], limit: str, used: int, cached: int = 0):
    folder.mkdir(parents=True, exist_ok=True)
    limit_file, used_file, stat = files
    (folder / limit_file).write_text(f"{limit}\n")
    (folder / used_file).write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 1\n{stat} {cached}\n")


@pytest.mark.parametrize(
    "own", ["0::/\n", "4:memory:/\n0::/\n", "4:memory:/outside\n0::/outside\n"]
)
@pytest.mark.parametrize(("files", "folder"), [(V2, ""), (V1, "memory")])
@pytest.mark.parametrize(
    ("used", "cached", "left"), [(400, 0, 600), (1200, 0, 0), (900, 800, 900), (500, 100, 600)]
)
def test_available__is_what_the_container_leaves(tmp_path, own, files, folder, used, cached, left):
    """A container sees its group at the top, even if its path is that of the host."""
    (tmp_path / "own").write_text(own)
    write_group(tmp_path / folder, files, "1000", used, cached)
    assert available_memory_bytes(tmp_path, tmp_path / "own") == left


def test_available__is_limited_by_every_group_above(tmp_path):
    (tmp_path / "own").write_text("1:cpu,cpuacct:/x\n4:memory:/a/b\n0::/c/d\n")
    write_group(tmp_path / "memory" / "a" / "b", V1, str(2**63 - 4096), 500)
    write_group(tmp_path / "memory" / "a", V1, "2000", 500)
    write_group(tmp_path / "c" / "d", V2, "max", 500)
    assert available_memory_bytes(tmp_path, tmp_path / "own") == 1500
    write_group(tmp_path / "c", V2, "1600", 600)
    assert available_memory_bytes(tmp_path, tmp_path / "own") == 1000


def test_available__is_within_the_limit_of_the_process(tmp_path, monkeypatch):
    used = psutil.Process().memory_info().vms
    limit = (used + (64 << 20), resource.RLIM_INFINITY)
    monkeypatch.setattr(resource, "getrlimit", lambda _: limit)
    assert 32 << 20 < available_memory_bytes(tmp_path, tmp_path / "none") < 96 << 20


def test_available__without_limit_is_the_machines(tmp_path):
    write_group(tmp_path, V2, "max", 400)
    for groups in (tmp_path, tmp_path / "none"):
        found = available_memory_bytes(groups, tmp_path / "none")
        assert 0 < found <= psutil.virtual_memory().total


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="ru_maxrss crosses exec on Linux")
def test_peak__excludes_the_parent_process():
    held = bytearray(300 * 2**20)
    held[::4096] = b"x" * len(held[::4096])
    code = "from runtime.engine.memory import peak_memory_bytes; print(peak_memory_bytes())"
    assert int(run_python("-c", code).stdout) < 200 * 2**20 < len(held)
