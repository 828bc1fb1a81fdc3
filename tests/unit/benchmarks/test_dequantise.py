"""The benchmark of dequantising, with small matrices."""

from pathlib import Path

import pytest
import torch

from benchmarks import dequantise
from benchmarks.config import DequantiseConfig
from benchmarks.reports import read_document
from benchmarks.tables import formats


def test_dequantise__is_timed_beside_the_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    experts = {
        "mxfp4": (dequantise.make_mxfp4, ((64, 64),)),
        "fp8": (dequantise.make_fp8, ((128, 256),)),
    }
    monkeypatch.setattr(dequantise, "EXPERTS", experts)
    output, threads = tmp_path / "dequantise.json", torch.get_num_threads()
    dequantise.run_dequantise(DequantiseConfig(repetitions=2, threads=threads, output=output))
    report = read_document(output)
    rows = report.rows
    assert [row["format"] for row in rows] == ["mxfp4", "fp8"]
    assert all(row["ours_seconds"] > 0 and row["speed"] > 0 for row in rows)

    assert "| mxfp4 | " in "\n".join(formats.dequantise_table(report))
