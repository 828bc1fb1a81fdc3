"""`python -m benchmarks gpu` runs all its steps on the CPU and on a simulated device."""

import pytest

from benchmarks import gpu
from benchmarks.config import GpuConfig
from benchmarks.reports import read_document


@pytest.mark.parametrize(("device", "steps"), [("cpu", 12), ("sim", 3)])
def test_benchmark__ends_with_a_report_of_equal_tokens(
    request, tmp_path, monkeypatch, capsys, device, steps
):
    if device == "sim":
        request.getfixturevalue("sim")
    tiny = gpu.tiny_config()
    monkeypatch.setattr(gpu, "tiny_config", lambda: tiny)
    monkeypatch.setattr(gpu, "scaled_config", lambda *_: tiny)
    for name, small in {"COPY_BYTES": 1 << 16, "MATRIX": 16, "PRODUCTS": 2}.items():
        monkeypatch.setattr(gpu, name, small)
    given = {"device": device, "output": tmp_path / "gpu.json", "work": tmp_path / "work"}
    gpu.run_gpu(GpuConfig(**given, budget=["25%"], steps=steps, max_new_tokens=4))
    report = read_document(tmp_path / "gpu.json")
    assert [row.dtype for row in report.exactness] == ["float32", "bfloat16"]
    for row in report.exactness:
        assert row.logits_equal
        assert row.tokens_equal
        assert row.misses > (50 if device == "cpu" else 0)
    systems = [row.system for row in report.speed]
    assert systems == [gpu.ALL_RESIDENT, "on-demand", "promoe", "moecast"]
    assert report.speed[0].hit_rate == 1
    assert all(row.tokens_equal for row in report.speed)
    assert not list((tmp_path / "work").iterdir())
    said = capsys.readouterr().err
    if device == "cpu":
        assert all(row.over_plain < 1e-2 for row in report.exactness)
        assert report.overlap is None, "not measured on the CPU"
    else:
        assert report.accelerator.name == "Simulated"
        assert "copies and computation overlap" in said
