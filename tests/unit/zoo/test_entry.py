"""Writing an entry: whole or not there; what a manifest may say."""

import json
import signal
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from predictors.records import ModelRecord
from predictors.spec import ModelSpec
from tests.builders.entries import tiny_entry, tiny_graph, tiny_spec
from tests.builders.processes import run
from tests.builders.zoos import fail_each_fsync
from zoo.digest import hash_bytes
from zoo.entry import ZooEntry, open_entry
from zoo.errors import MismatchError, ZooError
from zoo.load import load_predictor
from zoo.manifest import EntryManifest, FileRecord, parse_manifest


def test_entry__gives_back_what_was_written(tmp_path: Path) -> None:
    written = tiny_entry(tmp_path / "e")
    entry = open_entry(tmp_path / "e")
    assert entry.manifest == written
    assert entry.manifest.digest == hash_bytes((tmp_path / "e/manifest.json").read_bytes())
    assert set(entry.payload()) == {"predictors/layer-00.onnx", "weights.safetensors"}
    assert entry.payload()["predictors/layer-00.onnx"] == tiny_graph()
    assert entry.manifest.spec == tiny_spec()
    assert entry.metrics()["held_out"]["accuracy"] == 0.9
    entry.verify()


@pytest.mark.parametrize(
    "data", [b"{", b"[1]", b"\xff", b"[" * 100_000], ids=["cut", "list", "bytes", "deep"]
)
def test_metrics__that_are_no_table_are_an_error_of_the_zoo(tmp_path: Path, data: bytes) -> None:
    """Loading a predictor reads them, and anyone may have written them."""
    manifest = tiny_entry(tmp_path / "e")
    record = FileRecord(sha256=hash_bytes(data), size=len(data))
    forged = EntryManifest(**{**dict(manifest), "files": {"metrics.json": record}})
    entry = ZooEntry(forged, "there", lambda *_: data)
    with pytest.raises(ZooError, match="metrics.json of tiny/stride is not"):
        entry.metrics()


def test_manifest__has_every_field_of_the_spec() -> None:
    # `base` is what a user says of a model, no property of it.
    recorded = {field.name for field in fields(ModelSpec)} - {"base"}
    assert set(ModelRecord.model_fields) == recorded


def test_write__replaces_no_other_folder(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("x")
    with pytest.raises(ZooError, match="exists and is not an entry"):
        tiny_entry(tmp_path)
    assert [path.read_text() for path in tmp_path.iterdir()] == ["x"]


def test_failed_write__leaves_the_folder_unchanged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The Nth fsync fails, for every N there is."""
    tiny_entry(tmp_path / "e", licence="MIT")
    for failing in fail_each_fsync(monkeypatch):
        with failing:
            tiny_entry(tmp_path / "e", licence="BSD-3-Clause")
        entry = open_entry(tmp_path / "e")
        entry.verify()
        assert entry.manifest.licence in ("MIT", "BSD-3-Clause")
        assert [path.name for path in tmp_path.iterdir()] == ["e"]
    assert entry.manifest.licence == "BSD-3-Clause"


KILLED = """
import os, sys
from pathlib import Path
from tests.builders.entries import tiny_entry
from tests.builders.killing import kill_before
kill_before(int(sys.argv[2]), (os, "fsync"))
tiny_entry(Path(sys.argv[1]))
"""


@pytest.mark.parametrize("number", [5, 11])
def test_write__killed_leaves_no_entry_under_its_name(number: int, tmp_path: Path) -> None:
    done = run(sys.executable, "-c", KILLED, tmp_path / "e", number, check=False)
    assert done.returncode == -signal.SIGKILL
    assert not (tmp_path / "e").exists()
    assert len(list(tmp_path.iterdir())) == 1
    tiny_entry(tmp_path / "e")
    assert list(tmp_path.iterdir()) == [tmp_path / "e"], "what the killed one left is gone"
    open_entry(tmp_path / "e").verify()


@pytest.mark.parametrize(
    ("field", "value"),
    [("model_id", "other"), ("revision", "r2"), ("config_hash", "d" * 64), ("num_layers", 3),
     ("num_experts", 16), ("top_k", 4), ("hidden_size", 8)],
)  # fmt: skip
def test_load__for_another_model_names_both_sides(field: str, value: object, entry: Path) -> None:
    with pytest.raises(MismatchError) as caught:
        load_predictor(entry, spec=tiny_spec(**{field: value}))
    message = str(caught.value)
    assert f"{field}: the zoo entry tiny/stride has {getattr(tiny_spec(), field)!r}" in message
    assert f"the model has {value!r}" in message


def test_load__another_dtype_is_the_same_model(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    files = {"predictors/layer_00_to_02.onnx": tiny_graph()}
    tiny_entry(tmp_path / "e", spec=tiny_spec(num_layers=3), files=files)
    with caplog.at_level("INFO"):
        predictor = load_predictor(tmp_path / "e", spec=tiny_spec(num_layers=3, dtype="bfloat16"))
    assert predictor.spec.dtype == "bfloat16"
    assert "float32 states, held-out accuracy 0.900; the model computes in bfloat16" in caplog.text


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("surprise", 1, "surprise: Extra inputs are not permitted"),
        ("format_version", 2, "format_version: Input should be 1"),
        ("name", "../x", "name: String should match"),
        ("trace_digest", "abc", "trace_digest: String should match"),
        ("files", {"../x.json": {"sha256": "a" * 64, "size": 1}}, "is not allowed"),
        ("files", {"x.pkl": {"sha256": "a" * 64, "size": 1}}, "an entry has only"),
        ("files", {"x.onnx": {"sha256": "a" * 64, "size": 65 << 20}}, "over 67,108,864"),
    ],
)
def test_manifest__refuses(key: str, value: object, message: str, entry: Path) -> None:
    content = json.loads((entry / "manifest.json").read_text()) | {key: value}
    with pytest.raises(ZooError, match=message):
        parse_manifest(json.dumps(content).encode(), what="it")


def test_graph__that_no_training_writes_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ZooError, match=r"predictors/x.onnx: .* not an ONNX model"):
        tiny_entry(tmp_path / "e", files={"predictors/x.onnx": b"\xff" * 99})
    assert not (tmp_path / "e").exists()
