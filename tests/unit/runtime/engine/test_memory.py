"""Memory of the process: its limit, its peak in addition to weights and budget, and its return to
the system."""

import ctypes
import resource

import psutil
import pytest
import torch

from runtime.engine.memory import available_memory_bytes, find_library_code
from runtime.hf.loading import unmap_weights
from tests.builders.processes import run_python

BOUND_MIB = 320
"""The documented 300, what processors differ by (kernels with AVX-512 are larger code), and the
matrices on which kernels for single rows are tried, 9 MiB for a moment."""

# Packages of the developers' extra are hidden: Transformers imports accelerate where it is, and
# with it boto3, 15 MiB that no user's process holds.
# In bfloat16 a prompt's products load oneDNN, 30 MiB more, as they do in plain Transformers.
SERVE = """
import sys
sys.modules.update(accelerate=None, boto3=None)
import torch
from runtime import load
model = load("qwen2-moe-tiny", dtype="float32", budget="25%", system="on-demand")
tokens = torch.arange(1, 33)[None]
mask = torch.ones_like(tokens)
model.generate(tokens, attention_mask=mask, max_new_tokens=16, do_sample=False)
weights = sum(parameter.nbytes for parameter in model.parameters())
# VmHWM and not ru_maxrss: that one is kept across exec, and starts with the test process's own.
peak = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(int(peak.split()[1]) * 1024 - weights - model.moecast.budget_bytes)
model.moecast.close()
"""


def test_load__peak_is_below_weights_and_budget_and_the_documented_size():
    overhead = int(run_python("-c", SERVE).stdout.splitlines()[-1]) / 2**20
    assert overhead < BOUND_MIB, f"{overhead:.0f} MiB"


MAPPINGS = [
    ("7f0000000000-7f0000002000 r-xp 00000000 08:01 1      /usr/lib/libcode.so", 0),
    ("7f0000002000-7f0000003000 r--p 00002000 08:01 1      /usr/lib/libcode.so", 4),
    ("7f0000003000-7f0000004000 rw-p 00003000 08:01 1      /usr/lib/libcode.so", 0),
    ("7f0000004000-7f0000005000 r--p 00000000 08:01 2      /models/a b.safetensors", 0),
    ("7f0000005000-7f0000006000 rw-p 00000000 00:00 0 ", 4),
    ("7f0000006000-7f0000008000 r--p 00000000 08:01 3      /usr/lib/libc.so.6", 0),
]
"""Lines of `/proc/PID/smaps`, and KiB that are no file's."""


def test_library_code__excludes_names_of_other_files(tmp_path):
    smaps = tmp_path / "smaps"
    lines = (f"{line}\nRss:     8 kB\nAnonymous:     {kib} kB\n" for line, kib in MAPPINGS)
    smaps.write_text("".join(lines))
    first, last = (0x7F0000000000, 0x7F0000002000), (0x7F0000006000, 0x7F0000008000)
    assert list(find_library_code(smaps)) == [first, last]
    assert list(find_library_code(tmp_path / "none")) == []


def test_unmap_weights__copies_unaligned_and_keeps_shared_ones():
    model, raw = torch.nn.Module(), torch.arange(64, dtype=torch.float32)
    model.odd = torch.nn.Parameter(raw[1:17])
    model.even = torch.nn.Parameter(raw[32:48])
    model.tied = model.odd
    addresses = model.odd.data_ptr(), model.even.data_ptr()
    unmap_weights(model, mapped=False)
    assert model.odd.data_ptr() % 64 == 0 != addresses[0] % 64
    assert model.even.data_ptr() == addresses[1]
    assert model.tied.data_ptr() == model.odd.data_ptr()
    assert torch.equal(model.odd, raw[1:17])
    unmap_weights(model)
    assert model.even.data_ptr() != addresses[1]


PRELUDE = """
import ctypes, resource
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.free.argtypes = [ctypes.c_void_p]
libc.memset.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]
def filled(size):
    block = libc.malloc(size)
    libc.memset(block, 1, size)
    return block
"""


def run_with_libc(code: str, function: str):
    """Runs it in a separate process, where the contents of the heap are known."""
    if not hasattr(ctypes.CDLL(None), function):
        pytest.skip("glibc's heap is meant")
    return run_python("-c", PRELUDE + code)


def test_heap__that_a_hole_keeps_goes_back():
    code = """
from pathlib import Path
from runtime.engine.memory import return_free_heap
blocks = [filled(100_000) for _ in range(1000)]  # below what malloc maps by itself
for block in blocks[:-1]:
    libc.free(block)
def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
before = resident()
return_free_heap()
print(before - resident())
"""
    assert int(run_with_libc(code, "malloc_trim").stdout) > 90_000_000


@pytest.mark.parametrize("shared", [True, False])
def test_heap__is_one_for_all_threads_once_it_is_shared(shared):
    code = f"""
import threading
from concurrent.futures import ThreadPoolExecutor
from runtime.engine.memory import share_one_heap
if {shared}:
    share_one_heap()
together = threading.Barrier(8)
def work(_):
    together.wait()
    for _ in range(100):
        libc.malloc(5000)
with ThreadPoolExecutor(8) as pool:
    list(pool.map(work, range(8)))
libc.malloc_stats()
"""
    assert (run_with_libc(code, "malloc_stats").stderr.count("Arena ") == 1) == shared


# ---- limits


V2 = ("memory.max", "memory.current", "inactive_file")
V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def write_group(folder, files: tuple[str, str, str], limit: str, used: int, cached: int = 0):
    folder.mkdir(parents=True, exist_ok=True)
    limit_file, used_file, stat = files
    (folder / limit_file).write_text(f"{limit}\n")
    (folder / used_file).write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 1\n{stat} {cached}\n")


LEFT = [(400, 0, 600), (1200, 0, 0), (900, 800, 900), (500, 100, 600)]


@pytest.mark.parametrize("own", ["0::/\n", "4:memory:/\n0::/\n", "4:memory:/other\n0::/other\n"])
@pytest.mark.parametrize(("files", "folder"), [(V2, ""), (V1, "memory")])
@pytest.mark.parametrize(("used", "cached", "left"), LEFT)
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
    limit = (psutil.Process().memory_info().vms + (64 << 20), resource.RLIM_INFINITY)
    monkeypatch.setattr(resource, "getrlimit", lambda _: limit)
    assert 32 << 20 < available_memory_bytes(tmp_path, tmp_path / "none") < 96 << 20


def test_available__without_limit_is_the_machines(tmp_path):
    write_group(tmp_path, V2, "max", 400)
    for groups in (tmp_path, tmp_path / "none"):
        found = available_memory_bytes(groups, tmp_path / "none")
        assert 0 < found <= psutil.virtual_memory().total


def test_peak__excludes_the_parent_process():
    """Linux keeps `ru_maxrss` across exec."""
    held = bytearray(300 * 2**20)
    held[::4096] = b"x" * len(held[::4096])
    code = "from runtime.engine.memory import peak_memory_bytes; print(peak_memory_bytes())"
    assert int(run_python("-c", code).stdout) < 200 * 2**20 < len(held)


def test_heap__keeps_the_pages_of_decoded_experts():
    code = """
from runtime.engine.memory import keep_decoded
libc.mallopt(-3, 256 << 10)  # as the server does
SIZE = 20_000_000
keep_decoded(SIZE)
for _ in range(4):
    libc.free(filled(SIZE))
faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
filled(SIZE)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults)
"""
    assert int(run_with_libc(code, "mallopt").stdout) < 100  # of nearly 5,000 pages
