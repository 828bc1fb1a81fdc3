"""`python -m benchmarks gpu` runs on a simulated device to its last line."""

import json

import pytest

from benchmarks import gpu
from benchmarks.config import GpuConfig


@pytest.mark.usefixtures("sim")
def test_benchmark__ends_with_a_report_of_equal_tokens(tmp_path, monkeypatch, capsys):
    tiny = gpu.tiny_config()
    monkeypatch.setattr(gpu, "tiny_config", lambda: tiny)
    monkeypatch.setattr(gpu, "scaled_config", lambda *_: tiny)
    for name, small in {"COPY_BYTES": 1 << 16, "MATRIX": 16, "PRODUCTS": 2}.items():
        monkeypatch.setattr(gpu, name, small)
    output = tmp_path / "gpu.json"
    gpu.run_gpu(
        GpuConfig(
            device="sim",
            output=output,
            work=tmp_path / "work",
            budget=["25%"],
            steps=3,
            max_new_tokens=3,
        )
    )
    report = json.loads(output.read_text())
    assert report["accelerator"]["name"] == "Simulated"
    assert all(row["tokens_equal"] for row in report["exactness"] + report["speed"])
    assert "copies and computation overlap" in capsys.readouterr().err
