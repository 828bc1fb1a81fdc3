"""Commands on a device: chat, bench, doctor and recording."""

import io

import numpy as np
import pytest

from collect.plan import RecordingJob, recording_settings
from collect.recorder import UnitRecorder
from collect.traces.layout import ALL_SIGNALS
from runtime.commands import bench, chat, doctor
from runtime.config import DoctorConfig
from runtime.engine import devices
from runtime.generation.config import ChatConfig
from runtime.presets import load_system
from runtime.tools.bench import tasks
from runtime.tools.bench.config import BenchConfig
from tests.builders.children import run_in_folder
from tests.builders.recordable import recordable
from tests.unit.collect.test_record import make_data


def test_chat__answers_as_on_the_cpu(speaking, sim, monkeypatch, capsys):
    answers = []
    for device in ("cpu", "sim"):
        monkeypatch.setattr("sys.stdin", io.StringIO("The sky is\nAnd then?\n"))
        options = {"budget": "40%", "temperature": 0, "max_new_tokens": 5}
        assert chat.run(ChatConfig(model=speaking, device=device, **options))["num_answers"] == 2
        answers.append(capsys.readouterr().out)
    assert answers[0] == answers[1]
    assert sim.memories[0].peak_bytes > 0


def test_bench__finds_the_tokens_of_plain_transformers(speaking, sim, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    for module in (bench, tasks):  # a child has no simulated device
        monkeypatch.setattr(module, "run_in_child", run_in_folder)
    config = BenchConfig(
        model=speaking, system=[load_system("mixtral-offloading")], budget=["40%"], device="sim",
        max_new_tokens=3, warm_up_tokens=2, verify=True,
    )  # fmt: skip
    rows = bench.run(config)["rows"]
    assert len(rows) == 2
    assert all(row["failed"] is None for row in rows), rows


def test_doctor__suggests_what_a_device_has_room_for(speaking, sim, monkeypatch):
    monkeypatch.setattr(devices, "AUTO_TYPES", ("sim",))
    report = doctor.run(DoctorConfig(model=speaking, budget=["50%"], seconds=1))
    assert len(report["bandwidth"]["links_bytes_per_second"]) == len(sim.devices)
    assert len(report["hybrid"]) == len(sim.devices)
    assert report["suggested_budget_bytes"] == report["model"]["experts_bytes"]
    assert "free: 1.0 GiB" in report["suggestion_rests_on"]


@pytest.mark.usefixtures("sim")
def test_recording__has_the_signals_of_the_cpu(tmp_path, monkeypatch):
    model, data = recordable(tmp_path / "model"), make_data(tmp_path, count=3)
    job = RecordingJob(model, data, "trace", ALL_SIGNALS, recording_settings(data), "40%")
    found = []
    for kind in ("cpu", "sim"):
        monkeypatch.setattr(devices, "AUTO_TYPES", (kind,))
        recorder = UnitRecorder.load(job)
        with recorder.model.moecast:
            assert recorder.model.device.type == kind
            found.append(recorder.record(0)[0])
    assert found[0].keys() == found[1].keys()
    for name, expected in found[0].items():
        # Settings of decode steps on a CPU (`runtime.hf.decode_step`) change last bits there.
        np.testing.assert_allclose(found[1][name], expected, rtol=2e-3, atol=1e-4, err_msg=name)
