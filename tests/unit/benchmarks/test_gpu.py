"""The benchmark of accelerators runs all its steps, on the CPU, so that the first GPU can too."""

import pytest

from benchmarks.config import GpuConfig
from benchmarks.gpu import ALL_RESIDENT, run_gpu
from benchmarks.reports import read_document
from predictors.errors import MoecastError
from runtime.accelerator import find_accelerator
from runtime.errors import CheckpointError


def test_gpu__runs_every_step_on_the_cpu(tmp_path):
    work = tmp_path / "work"
    run_gpu(
        GpuConfig(
            device="cpu",
            output=tmp_path / "gpu.json",
            work=work,
            budget=["25%"],
            steps=12,
            max_new_tokens=4,
        )
    )
    report = read_document(tmp_path / "gpu.json")
    assert [row.dtype for row in report.exactness] == ["float32", "bfloat16"]
    for row in report.exactness:
        assert row.logits_equal
        assert row.tokens_equal
        assert row.misses > 50
        assert row.over_plain < 1e-2
    systems = [row.system for row in report.speed]
    assert systems == [ALL_RESIDENT, "on-demand", "promoe", "moecast"]
    assert report.speed[0].hit_rate == 1
    assert all(row.tokens_equal for row in report.speed)
    assert report.overlap is None, "not measured on the CPU"
    assert not list(work.iterdir())


@pytest.mark.skipif(find_accelerator() is not None, reason="there is an accelerator")
def test_gpu__says_that_there_is_none(tmp_path):
    output = tmp_path / "gpu.json"
    with pytest.raises(MoecastError, match="no CUDA or XPU device; device=cpu"):
        run_gpu(GpuConfig(output=output, work=tmp_path / "work"))
    with pytest.raises(CheckpointError, match="sees no XPU device, but cpu"):
        run_gpu(GpuConfig(output=output, work=tmp_path / "work", device="xpu"))
    assert not output.exists()
