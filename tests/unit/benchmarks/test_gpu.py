"""The benchmark of accelerators without one; `tests/devices` runs all its steps."""

import pytest

from benchmarks.config import GpuConfig
from benchmarks.gpu import run_gpu
from predictors.errors import MoecastError
from runtime.accelerator import find_accelerator
from runtime.errors import CheckpointError


@pytest.mark.skipif(find_accelerator() is not None, reason="there is an accelerator")
def test_gpu__says_that_there_is_none(tmp_path):
    output = tmp_path / "gpu.json"
    with pytest.raises(MoecastError, match="no CUDA or XPU device; device=cpu"):
        run_gpu(GpuConfig(output=output, work=tmp_path / "work"))
    with pytest.raises(CheckpointError, match="sees no XPU device, but cpu"):
        run_gpu(GpuConfig(output=output, work=tmp_path / "work", device="xpu"))
    assert not output.exists()
