"""Memory of the process in addition to weights and budget, and its return to the system."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from runtime.engine.memory import find_library_code
from runtime.hf.loading import unmap_weights

ROOT = Path(__file__).resolve().parents[4]
BOUND_MIB = 310
"""The documented 300, and what processors differ by: kernels with AVX-512 are larger code."""
LINUX = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")

# Packages of the developers' extra are hidden: Transformers imports accelerate where it is, and
# with it boto3, 15 MiB that no user's process holds.
# In bfloat16 a prompt's products load oneDNN, 30 MiB more, as they do in plain Transformers.
SERVE = """
import sys
from importlib.machinery import PathFinder

class Installed(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        hidden = name.partition(".")[0] in ("accelerate", "boto3")
        return None if hidden else super().find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(PathFinder)] = Installed
import torch
from runtime import load
model = load("qwen2-moe-tiny", dtype="float32", budget="25%", system="on-demand")
tokens = torch.arange(1, 33)[None]
model.generate(
    tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=16, do_sample=False
)
weights = sum(parameter.nbytes for parameter in model.parameters())
# VmHWM and not ru_maxrss: that one is kept across exec, and starts with the test process's own.
peak = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(int(peak.split()[1]) * 1024 - weights - model.moecast.budget_bytes)
model.moecast.close()
"""


@LINUX
def test_load__peak_is_below_weights_and_budget_and_the_documented_size():
    done = subprocess.run(
        [sys.executable, "-c", SERVE],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=400,
        check=True,
    )
    overhead = int(done.stdout.splitlines()[-1]) / 2**20
    assert overhead < BOUND_MIB, f"{overhead:.0f} MiB"


SMAPS = """\
7f0000000000-7f0000002000 r-xp 00000000 08:01 1      /usr/lib/libcode.so
Rss:                   8 kB
Anonymous:             0 kB
7f0000002000-7f0000003000 r--p 00002000 08:01 1      /usr/lib/libcode.so
Rss:                   4 kB
Anonymous:             4 kB
7f0000003000-7f0000004000 rw-p 00003000 08:01 1      /usr/lib/libcode.so
Rss:                   4 kB
Anonymous:             0 kB
7f0000004000-7f0000005000 r--p 00000000 08:01 2      /models/a b.safetensors
Rss:                   4 kB
Anonymous:             0 kB
7f0000005000-7f0000006000 rw-p 00000000 00:00 0
Rss:                   4 kB
Anonymous:             4 kB
7f0000006000-7f0000008000 r--p 00000000 08:01 3      /usr/lib/libc.so.6
Rss:                   8 kB
Anonymous:             0 kB
"""


def test_library_code__excludes_names_of_other_files(tmp_path):
    smaps = tmp_path / "smaps"
    smaps.write_text(SMAPS)
    assert list(find_library_code(smaps)) == [
        (0x7F0000000000, 0x7F0000002000),
        (0x7F0000006000, 0x7F0000008000),
    ]
    assert list(find_library_code(tmp_path / "none")) == []


def test_unmap_weights__copies_unaligned_and_keeps_shared_ones():
    model = torch.nn.Module()
    raw = torch.arange(64, dtype=torch.float32)
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


@LINUX
def test_heap__that_a_hole_keeps_goes_back() -> None:
    """Runs in a separate process, where the contents of the heap are known."""
    code = """
import ctypes, resource
from pathlib import Path
from runtime.engine.memory import return_free_heap
libc = ctypes.CDLL(None)
if not hasattr(libc, "malloc_trim"):
    print("another libc")
    raise SystemExit
libc.malloc.restype = ctypes.c_void_p
libc.free.argtypes = [ctypes.c_void_p]
libc.memset.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]
SIZE = 100_000  # below what malloc maps by itself
blocks = [libc.malloc(SIZE) for _ in range(1000)]
for block in blocks:
    libc.memset(block, 1, SIZE)
for block in blocks[:-1]:
    libc.free(block)
def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
before = resident()
return_free_heap()
print(before - resident())
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    if done.stdout == "another libc\n":
        pytest.skip("glibc's heap is meant")
    assert int(done.stdout) > 90_000_000


@LINUX
@pytest.mark.parametrize("shared", [True, False])
def test_heap__is_one_for_all_threads_once_it_is_shared(tmp_path, shared) -> None:
    code = f"""
import ctypes, sys, threading
from runtime.engine.memory import share_one_heap
libc = ctypes.CDLL(None)
if not hasattr(libc, "malloc_info"):
    print("another libc")
    raise SystemExit
if {shared}:
    share_one_heap()
libc.malloc.restype = ctypes.c_void_p
together = threading.Barrier(8)
def work():
    together.wait()
    for _ in range(100):
        libc.malloc(5000)
threads = [threading.Thread(target=work) for _ in range(8)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
libc.fopen.restype = ctypes.c_void_p
libc.malloc_info.argtypes = [ctypes.c_int, ctypes.c_void_p]
libc.fclose.argtypes = [ctypes.c_void_p]
out = libc.fopen(b"{tmp_path / "heaps.xml"}", b"w")
libc.malloc_info(0, out)
libc.fclose(out)
print(open("{tmp_path / "heaps.xml"}").read().count("<heap "))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    if done.stdout == "another libc\n":
        pytest.skip("glibc's heap is meant")
    assert (int(done.stdout) == 1) == shared
