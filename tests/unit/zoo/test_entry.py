"""An entry is written whole or not at all, refused where any byte was altered, and forecasts."""

import json
import os
import random
import signal
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest

from predictors.records import ModelRecord
from predictors.spec import ModelSpec
from tests.builders.entries import mlp_entry, tiny_entry, tiny_graph, tiny_spec
from tests.builders.killing import in_a_child, kill_before
from tests.builders.zoos import fail_each_fsync
from zoo.catalog import WritableZoo
from zoo.digest import check_path, hash_bytes
from zoo.entry import ZooEntry, open_entry
from zoo.errors import DamagedError, MismatchError, ZooError
from zoo.load import load_predictor
from zoo.manifest import EntryManifest, FileRecord, parse_manifest
from zoo.storage import cache_storage


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


NO_TABLES = {"cut": b"{", "list": b"[1]", "bytes": b"\xff", "deep": b"[" * 100_000}


@pytest.mark.parametrize("data", NO_TABLES.values(), ids=NO_TABLES)
def test_metrics__that_are_no_table_are_an_error_of_the_zoo(tmp_path: Path, data: bytes) -> None:
    """Loading a predictor reads them, and anyone may have written them."""
    manifest = tiny_entry(tmp_path / "e")
    record = FileRecord(sha256=hash_bytes(data), size=len(data))
    forged = EntryManifest(**{**dict(manifest), "files": {"metrics.json": record}})
    with pytest.raises(ZooError, match="metrics.json of tiny/stride is not"):
        ZooEntry(forged, "there", lambda *_: data).metrics()


def test_manifest__has_every_field_of_the_spec() -> None:
    # `base` is what a user says of a model, no property of it.
    assert set(ModelRecord.model_fields) == {field.name for field in fields(ModelSpec)} - {"base"}


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


@pytest.mark.parametrize("number", [5, 11])
def test_write__killed_leaves_no_entry_under_its_name(number: int, tmp_path: Path) -> None:
    def write() -> None:
        kill_before(number, (os, "fsync"))
        tiny_entry(tmp_path / "e")

    assert in_a_child(write) == -signal.SIGKILL
    assert not (tmp_path / "e").exists()
    assert len(list(tmp_path.iterdir())) == 1
    tiny_entry(tmp_path / "e")
    assert list(tmp_path.iterdir()) == [tmp_path / "e"], "what the killed one left is gone"
    open_entry(tmp_path / "e").verify()


@pytest.mark.parametrize(("field", "value"), [("revision", "r2"), ("num_experts", 16)])
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


REFUSED_FIELDS = [
    ("surprise", 1, "surprise: Extra inputs are not permitted"),
    ("format_version", 2, "format_version: Input should be 1"),
    ("name", "../x", "name: String should match"),
    ("name", f"{'x' * 196}/mlpx", "name: String should have at most 200 characters"),
    ("created", "2" * 80, "created: String should have at most 64 characters"),
    ("trace_digest", "abc", "trace_digest: String should match"),
    ("files", {"../x.json": {"sha256": "a" * 64, "size": 1}}, "is not allowed"),
    ("files", {"x.pkl": {"sha256": "a" * 64, "size": 1}}, "an entry has only"),
    ("files", {"x.onnx": {"sha256": "a" * 64, "size": 65 << 20}}, "over 67,108,864"),
]


@pytest.mark.parametrize(("key", "value", "message"), REFUSED_FIELDS)
def test_manifest__refuses(key: str, value: object, message: str, entry: Path) -> None:
    content = json.loads((entry / "manifest.json").read_text()) | {key: value}
    with pytest.raises(ZooError, match=message):
        parse_manifest(json.dumps(content).encode(), what="it")


def test_graph__that_no_training_writes_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ZooError, match=r"predictors/x.onnx: .* not an ONNX model"):
        tiny_entry(tmp_path / "e", files={"predictors/x.onnx": b"\xff" * 99})
    assert not (tmp_path / "e").exists()


def test_load__by_folder_and_by_name_forecast_alike(tmp_path: Path) -> None:
    mlp_entry(tmp_path / "e")
    WritableZoo(cache_storage()).add(open_entry(tmp_path / "e"))
    hidden_TD = np.array([[0.1, 0.9, 0.2, 0.3], [0.5, 0.1, 0.0, 0.7]], dtype=np.float32)
    # W is the unit matrix with four columns of zeros added.
    expected_TE = np.hstack([hidden_TD, np.zeros((2, 4), dtype=np.float32)])
    for reference in ("tiny/mlp", "tiny/mlp@latest", tmp_path / "e", str(tmp_path / "e")):
        (forecast,) = load_predictor(reference, spec=tiny_spec()).gate_input(0, hidden_TD)
        assert forecast.layer == 1
        assert np.array_equal(forecast.scores_TE, expected_TE)


FILES = [
    *("manifest.json", "manifest.sha256", "metrics.json", "README.md"),
    *("weights.safetensors", "predictors/layer-00.onnx"),
]


def flipped(data: bytes) -> bytes:
    """One bit, anywhere; the same place for the same bytes."""
    bit = 1 << random.Random(len(data)).randrange(len(data) * 8)
    return (int.from_bytes(data) ^ bit).to_bytes(len(data))


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "flipped bit": flipped,
    "truncated": lambda data: data[:-1],
    "empty": lambda _: b"",
    "appended byte": lambda data: data + b"\n",
}


PARSERS = (
    *("onnx.load_model_from_string", "safetensors.numpy.load", "json.loads"),
    *("huggingface_hub.ModelCard.__init__", "zoo.entry.parse_manifest"),
)


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("name", FILES)
def test_entry__refuses_damage_before_parsing(name, damage, entry, monkeypatch):
    path = entry / name
    path.write_bytes(DAMAGE[damage](path.read_bytes()))
    for parser in PARSERS if name.startswith("manifest") else PARSERS[:-1]:
        monkeypatch.setattr(parser, None)
    with pytest.raises(DamagedError, match="damaged"):
        open_entry(entry).read(name)


def test_entry__names_a_missing_file(entry: Path) -> None:
    (entry / "metrics.json").unlink()
    with pytest.raises(DamagedError, match=r"metrics\.json .* is missing"):
        open_entry(entry).verify()


@pytest.mark.parametrize(
    "path",
    ["../x.json", "/etc/passwd", "a/../../x.json", "a//b.json", "./a.json", "", ".hidden.json",
     "a\\b.json", "C:/x.json", "a/", "a\0b.json"],
)  # fmt: skip
def test_path__outside_the_entry_is_refused(path: str) -> None:
    with pytest.raises(ZooError, match="not allowed"):
        check_path(path)


LINKS = [("metrics.json", "metrics.json"), ("predictors", "predictors/layer-00.onnx")]


@pytest.mark.parametrize(("linked", "read"), LINKS)
def test_link__is_refused_though_its_bytes_are_right(linked: str, read: str, entry: Path) -> None:
    (entry / linked).symlink_to((entry / linked).rename(entry.parent / "outside"))
    with pytest.raises(ZooError, match="is a link"):
        open_entry(entry).read(read)
