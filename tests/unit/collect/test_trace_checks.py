"""Traces whose digests were made anew after a change: nothing impossible is trained on."""

import os
from pathlib import Path

import numpy as np
import pytest

from collect.errors import TraceError
from collect.traces import Trace
from collect.traces.layout import ROUTING_SIGNALS
from collect.traces.manifest import read_manifest
from predictors.errors import MoecastError
from tests.builders.forged import change_manifest, forge_shard, replace_file
from tests.builders.traces import make_spec, make_trace

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


@pytest.mark.parametrize(
    ("change", "message"),
    [
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
    ],
)
def test_trace__impossible_values_name_row_and_layer(tmp_path: Path, change, message: str) -> None:
    make_trace(tmp_path / "t", **SMALL)
    forge_shard(tmp_path / "t", change, shard=1)
    with pytest.raises(TraceError, match=message):
        Trace.open(tmp_path / "t")


def test_trace__may_hold_several_choices_of_none(tmp_path: Path) -> None:
    make_trace(tmp_path / "t", **SMALL)
    forge_shard(tmp_path / "t", put("experts.01", 3, [8, 8]))
    assert Trace.open(tmp_path / "t").column("experts", 1)[3].tolist() == [8, 8]


def shards_of(folder: Path, *order: int) -> list:
    shards = read_manifest(folder).shards
    return [shards[number] for number in order]


def test_trace__has_each_shard_once_and_in_order(tmp_path: Path) -> None:
    folder = make_trace(tmp_path / "t", **SMALL).path
    for order in [(0, 0), (1, 0), (0,), (), (0, 1, 1)]:
        first = make_trace(tmp_path / f"{len(order)}{sum(order)}", **SMALL).path
        change_manifest(first, shards=shards_of(first, *order))
        with pytest.raises(TraceError, match="its shards are of the units .* each of 2 once"):
            Trace.open(first)
    (one, two) = shards_of(folder, 0, 1)
    change_manifest(folder, shards=[one, two.model_copy(update={"data": one.data})])
    with pytest.raises(TraceError, match=r"the file 00000.*arrow is listed twice"):
        Trace.open(folder)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"num_layers": 10**9}, "num_layers"),
        ({"top_k": 9}, "top_k is 9, the model has 8 experts"),
        ({"hidden_size": 0}, "layer_input with hidden_size 0"),
        ({"hidden_size": 15}, "columns or rows differ"),
    ],
)
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
