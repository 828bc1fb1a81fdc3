"""The trace format: what is written is what is read, and anything else is refused, also where its
digests were made anew."""

import os
from pathlib import Path

import datasets
import numpy as np
import pytest

from collect.errors import TraceError
from collect.traces import Trace, TraceSignal, TraceWriter
from collect.traces.layout import ROUTING_SIGNALS, row_bytes
from collect.traces.manifest import read_manifest
from predictors.errors import MoecastError
from predictors.metrics import Phase
from tests.builders.forged import change_manifest, forge_shard, replace_file
from tests.builders.traces import make_plan, make_spec, make_trace, unit_content


def test_trace__round_trip(tmp_path: Path) -> None:
    trace = make_trace(tmp_path / "t", num_units=3, requests_per_unit=5)
    plan = trace.manifest.plan
    parts = [unit_content(plan, unit)[0] for unit in range(3)]
    assert trace.num_tokens == 3 * 5 * 10
    for signal in TraceSignal:
        for layer in range(4):
            whole = np.concatenate([part[f"{signal}.{layer:02d}"] for part in parts])
            column = trace.column(signal, layer)
            assert (column.shape, column.dtype) == (whole.shape, whole.dtype)
            np.testing.assert_array_equal(np.asarray(column), whole)
            for rows in (slice(40, 60), [149, 0, 77, -1], slice(None, None, 7), 107):
                np.testing.assert_array_equal(column[rows], whole[rows])
    np.testing.assert_array_equal(trace.tokens, np.concatenate([part["token"] for part in parts]))
    np.testing.assert_array_equal(trace.requests, np.repeat(np.arange(15), 10))
    np.testing.assert_array_equal(trace.positions, np.tile(np.arange(10), 15))


def test_column__is_a_view_of_the_file(tmp_path: Path) -> None:
    column = make_trace(tmp_path / "t").column("gate_input", 1)
    view = column[3:9]
    assert np.shares_memory(view, column.chunks[0])
    assert not view.flags.writeable


def test_trace__opens_with_datasets(tmp_path: Path) -> None:
    trace = make_trace(tmp_path / "t")
    opened = datasets.load_from_disk(str(tmp_path / "t"))
    assert len(opened) == trace.num_tokens
    row = opened.with_format("numpy")[123]
    np.testing.assert_array_equal(row["gate_input.02"], trace.column("gate_input", 2)[123])
    assert row["token"] == trace.tokens[123]
    assert set(opened.column_names) >= {"request", "position", "phase", "token", "experts.03"}


def test_trace__size_is_as_announced(tmp_path: Path) -> None:
    trace = make_trace(tmp_path / "t", requests_per_unit=200)
    written = sum(path.stat().st_size for path in (tmp_path / "t").glob("*.arrow"))
    expected = trace.num_tokens * row_bytes(trace.spec, trace.signals)
    assert expected <= written <= expected * 1.02


def test_steps__replay_each_request_in_order(tmp_path: Path) -> None:
    trace = make_trace(tmp_path / "t", requests_per_unit=6, prompt_tokens=5, new_tokens=3)
    steps = list(trace.steps())
    assert len(steps) == 12 * (1 + 3)
    assert [step.phases_T[0] for step in steps[:4]] == [Phase.PREFILL] + 3 * [Phase.DECODE]
    assert [step.num_tokens for step in steps[:4]] == [5, 1, 1, 1]
    np.testing.assert_array_equal(np.concatenate([step.tokens_T for step in steps]), trace.tokens)
    inputs = np.concatenate([step.gate_input(2) for step in steps])
    assert inputs.dtype == np.float32
    np.testing.assert_array_equal(inputs, np.asarray(trace.column("gate_input", 2), np.float32))
    assert (steps[0].experts(0).dtype, steps[0].logits(0).shape) == (np.int64, (5, 8))
    np.testing.assert_array_equal(steps[5].requests_T, [1])


def test_split__is_by_request(tmp_path: Path) -> None:
    trace = make_trace(tmp_path / "t", requests_per_unit=100)
    train, held_out = trace.rows("train"), trace.rows("held_out")
    assert sorted([*train, *held_out]) == list(range(trace.num_tokens))
    assert not set(trace.requests[train]) & set(trace.requests[held_out])
    held = {step.requests_T[0] for step in trace.steps("held_out")}
    assert held == set(trace.requests[held_out].tolist())
    for request in trace.request_table:
        assert (request.index in held) == (int(request.digest[:12], 16) % 10 == 0)


@pytest.mark.parametrize("suffix", [".arrow", ".requests.json", "state.json", "dataset_info.json"])
@pytest.mark.parametrize("damage", ["flip", "cut"])
def test_trace__damage_is_refused_before_parsing(tmp_path, monkeypatch, suffix, damage) -> None:
    make_trace(tmp_path / "t")
    victim = sorted((tmp_path / "t").glob(f"*{suffix}"))[0]
    data = bytearray(victim.read_bytes())
    if damage == "flip":
        data[len(data) // 2] ^= 1
    else:
        del data[-1]
    victim.write_bytes(data)
    monkeypatch.setattr("collect.traces.reader.map_stream", None)
    with pytest.raises(TraceError, match=rf"{victim.name} is damaged.*Nothing of it was read"):
        Trace.open(tmp_path / "t")


ALTERED = [
    ('"rows": 200', '"rows": 201', r"trace\.json is damaged"),
    ("{", '{"surprise": 1, ', "surprise"),
    ('"state.json"', '"../state.json"', "name"),
]


@pytest.mark.parametrize(("before", "after", "message"), ALTERED)
def test_manifest__that_was_altered_is_refused(tmp_path, before, after, message) -> None:
    path = make_trace(tmp_path / "t").path / "trace.json"
    path.write_text(path.read_text().replace(before, after, 1))
    with pytest.raises(TraceError, match=message):
        Trace.open(tmp_path / "t")


def test_trace__unknown_signal_lists_choices(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"gate_input.*Choices: experts, weights"):
        make_trace(tmp_path / "t", signals=ROUTING_SIGNALS).column("gate_input", 0)


@pytest.mark.parametrize("suffix", [".arrow", ".requests.json", "state.json", "dataset_info.json"])
def test_writer__makes_again_what_was_deleted(tmp_path: Path, suffix: str) -> None:
    first = make_trace(tmp_path / "t")
    sorted((tmp_path / "t").glob(f"*{suffix}"))[0].unlink()
    with pytest.raises(TraceError, match="is missing"):
        Trace.open(tmp_path / "t")
    assert make_trace(tmp_path / "t").digest == first.digest
    assert Trace.open(tmp_path / "t").digest == first.digest


def test_writer__refuses_the_folder_of_another_trace(tmp_path: Path) -> None:
    make_trace(tmp_path / "t", seed=0)
    with pytest.raises(TraceError, match=r"contains another trace.*settings.*output=PATH"):
        TraceWriter(tmp_path / "t", make_plan(make_spec(), seed=1))


def test_writer__refuses_a_folder_with_other_things(tmp_path: Path) -> None:
    (tmp_path / "diary.txt").write_text("dear diary")
    with pytest.raises(TraceError, match=r"not empty.*diary\.txt"):
        TraceWriter(tmp_path, make_plan(make_spec()))
    assert sorted(path.name for path in tmp_path.iterdir() if path.name[0] != ".") == ["diary.txt"]


SMALL = {"requests_per_unit": 3, "spec": make_spec(num_layers=2)}
"""Two shards of 30 rows each."""


def put(name, row, value):
    """Returns a change of a column's values in a row, or in rows."""

    def change(arrays, _requests):
        arrays[name][row] = value

    return change


def number_again(_arrays, requests):
    requests[1] = requests[1].model_copy(update={"index": 7})


def count_more(_arrays, requests):
    requests[0] = requests[0].model_copy(update={"generated_tokens": 2**62})


def move_a_token(_arrays, requests):
    requests[0] = requests[0].model_copy(update={"prompt_tokens": 7, "generated_tokens": 3})
    requests[1] = requests[1].model_copy(update={"prompt_tokens": 5, "generated_tokens": 5})


IMPOSSIBLE_VALUES = [
    (put("experts.01", 3, [0, 999]), r"row 33 \(request 3, position 3\), layer 1: .* 999; .*7"),
    (put("experts.01", 9, [5, 5]), r"row 39 .*layer 1: experts has an id twice: \[5, 5\]"),
    (put("gate_input.01", (4, 2), np.nan), r"row 34 .*layer 1: gate_input has nan"),
    (put("gate_logits.00", (29, 0), -np.inf), r"row 59 .*layer 0: gate_logits has -inf"),
    (put("request", 5, -1), r"row 35: request is -1, expected 3"),
    (put("request", slice(20), np.repeat([4, 3], 10)), r"row 30: request is 4, expected 3"),
    (put("position", 4, 3), r"row 34: position is 3, expected at least 4"),
    (put("phase", 2, 5), r"row 32: phase is 5, expected 0"),
    (move_a_token, r"row 36: phase is 1, expected 0"),
    (put("token", 8, -2), r"row 38: token is -2, expected at least -1"),
    (number_again, r"expected request 4 .* got 7|request is 4, expected"),
    (count_more, r"has 30 rows, its requests have 4,611,.* tokens"),
]


@pytest.mark.parametrize(("change", "message"), IMPOSSIBLE_VALUES)
def test_trace__impossible_values_name_row_and_layer(tmp_path: Path, change, message: str) -> None:
    make_trace(tmp_path / "t", **SMALL)
    forge_shard(tmp_path / "t", change, shard=1)
    with pytest.raises(TraceError, match=message):
        Trace.open(tmp_path / "t")


def test_trace__may_hold_several_choices_of_none(tmp_path: Path) -> None:
    make_trace(tmp_path / "t", **SMALL)
    forge_shard(tmp_path / "t", put("experts.01", 3, [8, 8]))
    assert Trace.open(tmp_path / "t").column("experts", 1)[3].tolist() == [8, 8]


def test_trace__has_each_shard_once_and_in_order(tmp_path: Path) -> None:
    folder = make_trace(tmp_path / "t", **SMALL).path
    one, two = read_manifest(folder).shards
    for shards in [(one, one), (two, one), (one,), (), (one, two, two)]:
        change_manifest(folder, shards=shards)
        with pytest.raises(TraceError, match="its shards are of the units .* each of 2 once"):
            Trace.open(folder)
    change_manifest(folder, shards=[one, two.model_copy(update={"data": one.data})])
    with pytest.raises(TraceError, match=r"the file 00000.*arrow is listed twice"):
        Trace.open(folder)


IMPOSSIBLE_MODELS = [
    ({"num_layers": 10**9}, "num_layers"),
    ({"top_k": 9}, "top_k is 9, the model has 8 experts"),
    ({"hidden_size": 0}, "layer_input with hidden_size 0"),
    ({"hidden_size": 15}, "columns or rows differ"),
]


@pytest.mark.parametrize(("changed", "message"), IMPOSSIBLE_MODELS)
def test_trace__of_an_impossible_model_is_refused(tmp_path: Path, changed, message: str) -> None:
    folder = make_trace(tmp_path / "t", **SMALL).path
    plan = read_manifest(folder).plan
    model = plan.model.model_copy(update=changed)
    change_manifest(folder, plan=plan.model_copy(update={"model": model}))
    with pytest.raises(TraceError, match=message):
        Trace.open(folder)


@pytest.mark.parametrize("data", [b"", b"ARROW1\0\0", b"\xff" * 64, b"[]", b"\0" * 8])
@pytest.mark.parametrize("suffix", [".arrow", ".requests.json"])
def test_trace__a_file_of_another_kind_is_named(tmp_path: Path, suffix: str, data: bytes) -> None:
    folder = make_trace(tmp_path / "t", signals=ROUTING_SIGNALS, **SMALL).path
    (name, *_) = sorted(path.name for path in folder.glob(f"*{suffix}"))
    replace_file(folder, name, data)
    with pytest.raises(TraceError, match=name.partition(".")[0]):
        Trace.open(folder)


@pytest.mark.parametrize("name", ["trace.json", "*.arrow", "*.requests.json"])
def test_trace__a_pipe_in_place_of_a_file_does_not_hang(tmp_path: Path, name: str) -> None:
    folder = make_trace(tmp_path / "t", signals=ROUTING_SIGNALS, **SMALL).path
    (victim, *_) = sorted(folder.glob(name))
    victim.unlink()
    os.mkfifo(victim)
    with pytest.raises(MoecastError, match=victim.name):
        Trace.open(folder)
