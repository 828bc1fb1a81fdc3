"""Published routing logs become traces that replay."""

import gzip
import json
from pathlib import Path

import numpy as np
import pytest

from collect.commands import import_log
from collect.config import ImportConfig, ImportSplit
from collect.errors import TraceError
from collect.importer import import_routing
from collect.traces import Trace
from predictors.metrics import Phase
from runtime.errors import RoutingLogError
from runtime.sim.routing_log import MAX_LINE

# Two requests that take turns, two layers (numbered 1 and 3 by the model: 0 and 2 are dense).
LOG = [
    {"request": "a", "position": 0, "layer": 1, "experts": [5, 2], "weights": [0.75, 0.25]},
    {"request": "a", "position": 0, "layer": 3, "experts": [0, 1], "weights": [0.5, 0.5]},
    {"request": "b", "position": 0, "layer": 1, "experts": [2, 3], "weights": [0.5, 0.5]},
    {"request": "a", "position": 1, "layer": 1, "experts": [4, 5], "weights": [0.5, 0.5]},
    {"request": "b", "position": 0, "layer": 3, "experts": [3, 2], "weights": [1.0, 0.0]},
    {"request": "a", "position": 1, "layer": 3, "experts": [1, 6], "weights": [0.5, 0.5]},
]


def write_log(path: Path, lines: list[dict]) -> Path:
    path.write_text("\n".join(json.dumps(line) for line in lines))
    return path


def test_import__arranges_by_request_and_token(tmp_path: Path) -> None:
    trace = import_routing(
        write_log(tmp_path / "log.jsonl", LOG), tmp_path / "t", ImportConfig(model_id="m")
    )
    assert trace.spec.num_layers == 2
    assert trace.spec.num_experts == 7
    assert trace.spec.top_k == 2
    assert trace.requests.tolist() == [0, 0, 1]
    np.testing.assert_array_equal(trace.column("experts", 0), [[5, 2], [4, 5], [2, 3]])
    np.testing.assert_array_equal(trace.column("experts", 1), [[0, 1], [1, 6], [3, 2]])
    np.testing.assert_array_equal(
        trace.column("weights", 0), [[0.75, 0.25], [0.5, 0.5], [0.5, 0.5]]
    )
    assert [step.phases_T[0] for step in trace.steps()] == 3 * [Phase.DECODE]
    assert trace.manifest.plan.source == "imported"


def test_import__tells_tokens_by_falling_layers(tmp_path: Path) -> None:
    bare = [{"layer": i % 3, "experts": [i, i + 1]} for i in range(9)]
    trace = import_routing(write_log(tmp_path / "log.jsonl", bare), tmp_path / "t")
    assert trace.positions.tolist() == [0, 1, 2]
    assert trace.tokens.tolist() == [-1, -1, -1]
    assert trace.signals == ("experts",)
    np.testing.assert_array_equal(trace.column("experts", 2), [[2, 3], [5, 6], [8, 9]])


def test_import__prefill_is_one_step(tmp_path: Path) -> None:
    lines = [
        {"layer": 0, "experts": [i], "position": i, "token": 10 + i, "phase": phase}
        for i, phase in enumerate(["prefill", "prefill", "decode"])
    ]
    trace = import_routing(write_log(tmp_path / "log.jsonl", lines), tmp_path / "t")
    assert [step.tokens_T.tolist() for step in trace.steps()] == [[10, 11], [12]]


def test_import__again_is_the_same_trace(tmp_path: Path) -> None:
    source = write_log(tmp_path / "log.jsonl", LOG)
    first = import_routing(source, tmp_path / "t")
    assert import_routing(source, tmp_path / "t").digest == first.digest
    assert Trace.open(tmp_path / "t").digest == first.digest


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"layer": 0, "experts": [1]}, "line 7: 1 experts, earlier lines have 2"),
        ({"layer": 0, "experts": [1, 1]}, "not 2 different ids"),
        ({"layer": 0, "experts": [1, 2], "surprise": 1}, "surprise: .*Keys: layer, experts"),
        ({"experts": [1, 2]}, "line 7: layer: Field required"),
        ({"layer": 0, "experts": [1, 2], "phase": "after"}, "allowed are prefill, decode"),
        (
            {"request": "b", "position": 1, "layer": 3, "experts": [3, 2], "weights": [1.0, 0.0]},
            "request 'b', position 1: expected each of the 2 layers",
        ),
        ({"request": "c", "layer": 1, "experts": [3, 2]}, "position 0: expected each"),
    ],
)
def test_import__bad_line_is_named(tmp_path: Path, line: dict, message: str) -> None:
    source = write_log(tmp_path / "log.jsonl", [*LOG, line])
    with pytest.raises(RoutingLogError, match=message):
        import_routing(source, tmp_path / "t")
    assert not (tmp_path / "t").exists()


def test_import__too_few_experts_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"expert 6 with num_experts=6"):
        import_routing(
            write_log(tmp_path / "log.jsonl", LOG), tmp_path / "t", ImportConfig(num_experts=6)
        )


@pytest.mark.parametrize("split", ["held_out", "train"])
def test_import__all_requests_are_in_the_split_asked_for(tmp_path: Path, split: str) -> None:
    source = write_log(tmp_path / "log.jsonl", LOG)
    asked = ImportSplit(split.replace("_", "-"))
    trace = import_routing(
        source, tmp_path / "t", ImportConfig(split=asked, origin="example.org, CC0")
    )
    assert len(trace.rows(split)) == trace.num_tokens == 3
    assert trace.manifest.plan.settings["origin"] == "example.org, CC0"


CSV = """step, layer, expert, weight, phase, request
0, 1, 5, 0.75, decode, a
0, 1, 2, 0.25, decode, a
0, 3, 0, 0.5, decode, a
0, 3, 1, 0.5, decode, a
1, 1, 4, 0.5, decode, a
1, 1, 5, 0.5, decode, a
1, 3, 1, 0.5, decode, a
1, 3, 6, 0.5, decode, a
"""


@pytest.mark.parametrize("name", ["log.csv", "log.csv.gz"])
def test_import__reads_csv_with_a_row_for_each_expert(tmp_path: Path, name: str) -> None:
    data = CSV.encode()
    source = tmp_path / name
    source.write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    trace = import_routing(source, tmp_path / "t")
    np.testing.assert_array_equal(trace.column("experts", 0), [[5, 2], [4, 5]])
    np.testing.assert_array_equal(trace.column("experts", 1), [[0, 1], [1, 6]])
    np.testing.assert_array_equal(trace.column("weights", 0), [[0.75, 0.25], [0.5, 0.5]])
    assert trace.positions.tolist() == [0, 1]


def test_import__reads_integers_as_data_frames_write_them(tmp_path: Path) -> None:
    """Columns with gaps are of floats, and null is absence."""
    plain = [{"layer": 0, "experts": [n], "token": 3, "position": n} for n in range(2)]
    gaps = {"request": None, "phase": None, "weights": None}
    framed = [{**gaps, "layer": 0.0, "experts": [n], "token": 3.0, "position": n} for n in range(2)]
    traces = [
        import_routing(write_log(tmp_path / f"{n}.jsonl", log), tmp_path / f"t{n}")
        for n, log in enumerate((plain, framed))
    ]
    (tmp_path / "2.csv").write_text(
        "layer,expert,token,position,request\n0.0,0,3.0,0.0,\n0.0,1,3.0,1.0,\n"
    )
    traces.append(import_routing(tmp_path / "2.csv", tmp_path / "t2"))
    for trace in traces:
        assert trace.positions.tolist() == [0, 1]
        assert trace.tokens.tolist() == [3, 3]
        np.testing.assert_array_equal(trace.column("experts", 0), [[0], [1]])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (CSV.replace("expert", "expert_id"), "line 1: columns .*expected layer, expert"),
        (CSV + "2, one, 1, 0.5, decode, a\n", "line 10: could not convert.*'one'"),
        (CSV + "2, 1, 1.5, 0.5, decode, a\n", r"experts\.0: Input should be a valid integer"),
        (CSV + "2, 1\n", "line 10: expected 6 columns"),
        ("layer,expert\n0," + "1" * 200_000 + "\n", "is not CSV"),
    ],
)
def test_import__bad_csv_is_named(tmp_path: Path, text: str, message: str) -> None:
    source = tmp_path / "log.csv"
    source.write_text(text)
    with pytest.raises(RoutingLogError, match=message):
        import_routing(source, tmp_path / "t")


def test_import__half_a_gzip_file_is_refused(tmp_path: Path) -> None:
    source = tmp_path / "log.csv.gz"
    source.write_bytes(gzip.compress(CSV.encode())[:-12])
    with pytest.raises(RoutingLogError, match="not a whole gzip file"):
        import_routing(source, tmp_path / "t")


@pytest.mark.parametrize("name", ["log.csv.gz", "log.jsonl.gz"])
def test_import__a_line_that_would_fill_the_memory_is_refused(name: str, tmp_path: Path) -> None:
    source = tmp_path / name
    source.write_bytes(gzip.compress(b"9" * (MAX_LINE + 1)))
    with pytest.raises(RoutingLogError, match="has a line of more than 1,048,576 characters"):
        import_routing(source, tmp_path / "t")


def test_import__missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(RoutingLogError, match="no such file"):
        import_routing(tmp_path / "nothing.jsonl", tmp_path / "t")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"layer": 10**9, "experts": [1]}, "layer"),
        ({"layer": 0, "experts": [2**15]}, r"experts\.0"),
        ({"layer": 0, "experts": [1], "token": 2**31}, "token"),
        ({"layer": 0, "experts": [1], "position": 2**31}, "position"),
        ({"layer": 0, "experts": [1], "weights": [float("nan")]}, r"weights\.0"),
        ("[" * 100_000, "line 1"),
        ('{"layer": ' + "1" * 5_000 + "}", "line 1"),
    ],
)
def test_import__values_that_do_not_fit_name_the_line(tmp_path: Path, line, message: str) -> None:
    text = line if isinstance(line, str) else json.dumps(line)
    (tmp_path / "log.jsonl").write_text(text)
    with pytest.raises(RoutingLogError, match=message):
        import_routing(tmp_path / "log.jsonl", tmp_path / "t")


def test_import__a_prompt_does_not_go_on_after_its_answer(tmp_path: Path) -> None:
    lines = [
        {"layer": 0, "experts": [1], "position": position, "phase": phase}
        for position, phase in enumerate(["prefill", "decode", "prefill"])
    ]
    with pytest.raises(TraceError, match="request '0', position 2: phase prefill after decode"):
        import_routing(write_log(tmp_path / "log.jsonl", lines), tmp_path / "t")


def test_import__what_no_trace_can_hold_is_refused(tmp_path: Path) -> None:
    layers = [{"layer": layer, "experts": [1]} for layer in range(5000)]
    log = write_log(tmp_path / "layers.jsonl", layers)
    with pytest.raises(TraceError, match=r"layers\.jsonl: num_layers"):
        import_routing(log, tmp_path / "t")
    log = write_log(tmp_path / "log.jsonl", layers[:1])
    for hidden_size in (-1, 2**24):
        with pytest.raises(TraceError, match=r"log\.jsonl: hidden_size"):
            import_routing(log, tmp_path / "t", ImportConfig(hidden_size=hidden_size))
    # The second token follows the last position that there is.
    last = [{"layer": 0, "experts": [1], "position": 2**31 - 1}, {"layer": 0, "experts": [1]}]
    with pytest.raises(TraceError, match=r"position 2147483648 is above"):
        import_routing(write_log(tmp_path / "log.jsonl", last), tmp_path / "t")


def test_import__a_file_name_may_have_any_bytes(tmp_path: Path) -> None:
    log = write_log(tmp_path / "l\udcff.jsonl", [{"layer": 0, "experts": [1]}])
    assert import_routing(log, tmp_path / "t").request_table[0].dataset == "l\ufffd.jsonl"


def test_import__writes_to_an_address_too(tmp_path: Path) -> None:
    log = write_log(tmp_path / "log.jsonl", [{"layer": 0, "experts": [1]}])
    address = f"memory://{tmp_path.name}/trace"
    import_log(ImportConfig(source=log, output=address))
    assert Trace.open(address).digest == import_routing(log, tmp_path / "t").digest
    with pytest.raises(TraceError, match="cannot be written to hf://a/b"):
        import_log(ImportConfig(source=log, output="hf://a/b"))
