"""Published routing logs become traces that replay."""

import gzip
import json
from pathlib import Path

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


def write_log(folder: Path, content: list | str, name: str = "log.jsonl") -> Path:
    """Lines are written as JSON, texts as they are; packed where the name says so."""
    if isinstance(content, list):
        content = "\n".join(one if isinstance(one, str) else json.dumps(one) for one in content)
    pack = gzip.compress if name.endswith(".gz") else bytes
    (folder / name).write_bytes(pack(content.encode()))
    return folder / name


def imported(folder: Path, content: list | str, name="log.jsonl", *, to="t", **config) -> Trace:
    return import_routing(write_log(folder, content, name), folder / to, ImportConfig(**config))


def phased(*phases: str) -> list[dict]:
    """A line for each of one layer's tokens."""
    return [
        {"layer": 0, "experts": [i], "position": i, "token": 10 + i, "phase": phase}
        for i, phase in enumerate(phases)
    ]


def test_import__arranges_by_request_and_token(tmp_path: Path) -> None:
    trace = imported(tmp_path, LOG, model_id="m")
    assert (trace.spec.num_layers, trace.spec.num_experts, trace.spec.top_k) == (2, 7, 2)
    assert trace.requests.tolist() == [0, 0, 1]
    assert trace.column("experts", 0)[:].tolist() == [[5, 2], [4, 5], [2, 3]]
    assert trace.column("experts", 1)[:].tolist() == [[0, 1], [1, 6], [3, 2]]
    assert trace.column("weights", 0)[:].tolist() == [[0.75, 0.25], [0.5, 0.5], [0.5, 0.5]]
    assert [step.phases_T[0] for step in trace.steps()] == 3 * [Phase.DECODE]
    assert trace.manifest.plan.source == "imported"


def test_import__tells_tokens_by_falling_layers(tmp_path: Path) -> None:
    trace = imported(tmp_path, [{"layer": i % 3, "experts": [i, i + 1]} for i in range(9)])
    assert (trace.positions.tolist(), trace.tokens.tolist()) == ([0, 1, 2], [-1, -1, -1])
    assert trace.signals == ("experts",)
    assert trace.column("experts", 2)[:].tolist() == [[2, 3], [5, 6], [8, 9]]


def test_import__prefill_is_one_step(tmp_path: Path) -> None:
    trace = imported(tmp_path, phased("prefill", "prefill", "decode"))
    assert [step.tokens_T.tolist() for step in trace.steps()] == [[10, 11], [12]]


BAD_LINES = [
    ({"layer": 0, "experts": [1]}, "line 7: 1 experts, earlier lines have 2"),
    ({"layer": 0, "experts": [1, 1]}, "not 2 different ids"),
    ({"layer": 0, "experts": [1, 2], "surprise": 1}, "surprise: .*Keys: layer, experts"),
    ({"experts": [1, 2]}, "line 7: layer: Field required"),
    ({"layer": 0, "experts": [1, 2], "phase": "after"}, "allowed are prefill, decode"),
    ({**LOG[4], "position": 1}, "request 'b', position 1: expected each of the 2 layers"),
    ({"request": "c", "layer": 1, "experts": [3, 2]}, "position 0: expected each"),
    ({"layer": 10**9, "experts": [1]}, "line 7: layer"),
    ({"layer": 0, "experts": [2**15]}, r"line 7: experts\.0"),
    ({"layer": 0, "experts": [1], "token": 2**31}, "line 7: token"),
    ({"layer": 0, "experts": [1], "position": 2**31}, "line 7: position"),
    ({"layer": 0, "experts": [1], "weights": [float("nan")]}, r"line 7: weights\.0"),
    ("[" * 100_000, "line 7"),
    ('{"layer": ' + "1" * 5_000 + "}", "line 7"),
]


@pytest.mark.parametrize(("line", "message"), BAD_LINES)
def test_import__bad_line_is_named(tmp_path: Path, line: dict | str, message: str) -> None:
    with pytest.raises(RoutingLogError, match=message):
        imported(tmp_path, [*LOG, line])
    assert not (tmp_path / "t").exists()


@pytest.mark.parametrize("split", ["held_out", "train"])
def test_import__all_requests_are_in_the_split_asked_for(tmp_path: Path, split: str) -> None:
    asked = ImportSplit(split.replace("_", "-"))
    trace = imported(tmp_path, LOG, split=asked, origin="example.org, CC0")
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
    trace = imported(tmp_path, CSV, name)
    assert trace.column("experts", 0)[:].tolist() == [[5, 2], [4, 5]]
    assert trace.column("experts", 1)[:].tolist() == [[0, 1], [1, 6]]
    assert trace.column("weights", 0)[:].tolist() == [[0.75, 0.25], [0.5, 0.5]]
    assert trace.positions.tolist() == [0, 1]


def test_import__a_byte_order_mark_is_no_text(tmp_path: Path) -> None:
    lines = "\n".join(map(json.dumps, LOG))
    for name, text in (("log.csv", CSV), ("log.jsonl", lines)):
        marked = imported(tmp_path, f"\ufeff{text}", name, to=f"marked-{name}")
        expected = imported(tmp_path, text, name, to=f"trace-{name}")
        assert marked.positions.tolist() == expected.positions.tolist()


def test_import__reads_integers_as_data_frames_write_them(tmp_path: Path) -> None:
    """Columns with gaps are of floats, and null is absence."""
    plain = [{"layer": 0, "experts": [n], "token": 3, "position": n} for n in range(2)]
    gaps = {"request": None, "phase": None, "weights": None}
    framed = [{**line, **gaps, "layer": 0.0, "token": 3.0} for line in plain]
    table = "layer,expert,token,position,request\n0.0,0,3.0,0.0,\n0.0,1,3.0,1.0,\n"
    for content, name in ((plain, "a.jsonl"), (framed, "b.jsonl"), (table, "c.csv")):
        trace = imported(tmp_path, content, name, to=f"trace-{name}")
        assert (trace.positions.tolist(), trace.tokens.tolist()) == ([0, 1], [3, 3])
        assert trace.column("experts", 0)[:].tolist() == [[0], [1]]


def test_import__an_empty_name_is_a_request_of_its_own(tmp_path: Path) -> None:
    lines = [{**LOG[0], "request": name} for name in ("", 0, "a")]
    lines += [{**line, "layer": 3} for line in lines]
    assert imported(tmp_path, lines).requests.tolist() == [0, 1, 2]


BAD_CSV = [
    (CSV.replace("expert", "expert_id"), "line 1: columns .*expected layer, expert"),
    (CSV + "2, one, 1, 0.5, decode, a\n", "line 10: could not convert.*'one'"),
    (CSV + "2, 1, 1.5, 0.5, decode, a\n", r"experts\.0: Input should be a valid integer"),
    (CSV + "2, 1\n", "line 10: expected 6 columns"),
    ("layer,expert\n0," + "1" * 200_000 + "\n", "is not CSV"),
    *((f"layer,expert\n0,1\n0,2\n0,{n}\n0,3\n", "neither position nor step") for n in (1, 4)),
]


def test_import__tokens_of_one_layer_may_be_told_by_their_ids(tmp_path: Path) -> None:
    trace = imported(tmp_path, "layer,expert,token\n0,1,7\n0,2,7\n0,3,8\n0,1,8\n", "log.csv")
    assert trace.column("experts", 0)[:].tolist() == [[1, 2], [3, 1]]


@pytest.mark.parametrize(("text", "message"), BAD_CSV)
def test_import__bad_csv_is_named(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(RoutingLogError, match=message):
        imported(tmp_path, text, "log.csv")


def test_import__half_a_file_and_none_are_refused(tmp_path: Path) -> None:
    source = write_log(tmp_path, CSV, "log.csv.gz")
    source.write_bytes(source.read_bytes()[:-12])
    with pytest.raises(RoutingLogError, match="not a whole gzip file"):
        import_routing(source, tmp_path / "t", ImportConfig())
    with pytest.raises(RoutingLogError, match="no such file"):
        import_routing(tmp_path / "nothing.jsonl", tmp_path / "t", ImportConfig())


@pytest.mark.parametrize("name", ["log.csv.gz", "log.jsonl.gz"])
def test_import__a_line_that_would_fill_the_memory_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(RoutingLogError, match="has a line of more than 1,048,576 characters"):
        imported(tmp_path, "9" * (MAX_LINE + 1), name)


LINE = {"layer": 0, "experts": [1]}
TURNED = phased("prefill", "decode", "prefill")
IMPOSSIBLE = {
    "experts": (LOG, {"num_experts": 6}, "expert 6 with num_experts=6"),
    "phases": (TURNED, {}, "'0', position 2: phase prefill after decode"),
    "layers": ([{**LINE, "layer": layer} for layer in range(5000)], {}, r"log\.jsonl: num_layers"),
    "negative size": ([LINE], {"hidden_size": -1}, r"log\.jsonl: hidden_size"),
    "size": ([LINE], {"hidden_size": 2**24}, r"log\.jsonl: hidden_size"),
    # The second token follows the last position that there is.
    "positions": ([{**LINE, "position": 2**31 - 1}, LINE], {}, "position 2147483648 is above"),
}


@pytest.mark.parametrize(("lines", "config", "message"), IMPOSSIBLE.values(), ids=IMPOSSIBLE)
def test_import__what_no_trace_can_hold_is_refused(tmp_path: Path, lines, config, message) -> None:
    with pytest.raises(TraceError, match=message):
        imported(tmp_path, lines, **config)


def test_import__a_file_name_may_have_any_bytes(tmp_path: Path) -> None:
    assert imported(tmp_path, [LINE], "l\udcff.jsonl").request_table[0].dataset == "l\ufffd.jsonl"


def test_import__writes_to_an_address_too(tmp_path: Path) -> None:
    log = write_log(tmp_path, [LINE])
    address = f"memory://{tmp_path.name}/trace"
    import_log(ImportConfig(source=log, output=address))
    assert Trace.open(address).digest == import_routing(log, tmp_path / "t", ImportConfig()).digest
    with pytest.raises(TraceError, match="cannot be written to hf://a/b"):
        import_log(ImportConfig(source=log, output="hf://a/b"))
