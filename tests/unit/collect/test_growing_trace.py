"""Traces that grow: always finished, whole requests, one writer, one model."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from collect.errors import TraceError
from collect.traces import Trace
from collect.traces.growing import GrowingTrace
from tests.builders.growing import NUM_ADDITIONS, PER_ADDITION, make_request, open_growing
from tests.builders.traces import make_spec, make_trace

ROOT = Path(__file__).resolve().parents[3]


def test_trace__is_finished_after_each_addition(tmp_path: Path) -> None:
    trace = open_growing(tmp_path)
    for number in range(3):
        trace.add([make_request(2 * number), make_request(2 * number + 1)])
        read = Trace.open(tmp_path, model=make_spec())
        assert [request.index for request in read.request_table] == [*range(2 * number + 2)]
        assert trace.num_bytes == sum(path.stat().st_size for path in tmp_path.glob("0*"))
    for request in read.request_table:
        expected = make_request(request.index)
        rows = np.flatnonzero(read.requests == request.index)
        assert request.prompt_tokens == expected.prompt_tokens
        assert read.positions[rows].tolist() == [
            expected.first_position + i for i in range(expected.num_rows)
        ]
        np.testing.assert_array_equal(
            read.column("gate_input", 1)[rows], expected.columns["gate_input.01"]
        )


def test_trace__goes_on_where_it_ended(tmp_path: Path) -> None:
    first = open_growing(tmp_path)
    first.add([make_request(0)])
    first.close()
    second = open_growing(tmp_path)
    second.add([make_request(1)])
    read = Trace.open(tmp_path)
    assert [request.digest for request in read.request_table] == [
        make_request(0).digest,
        make_request(1).digest,
    ]
    whole = open_growing(tmp_path / "whole")
    whole.add([make_request(0)])
    whole.add([make_request(1)])
    assert Trace.open(tmp_path / "whole").digest == read.digest


def test_trace__killed_at_every_disk_operation_has_whole_additions(tmp_path: Path) -> None:
    made = subprocess.run(
        [sys.executable, "-m", "tests.builders.growing", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    num_killed = int(made.stdout)
    # Data, requests and trace.json: each file is fsynced, renamed, and its folder fsynced.
    assert num_killed == 3 * 3 * NUM_ADDITIONS
    seen = set()
    for number in range(num_killed):
        folder = tmp_path / str(number)
        trace = open_growing(folder)
        count = len(Trace.open(folder).request_table) if trace.num_bytes else 0
        assert count in (0, PER_ADDITION, 2 * PER_ADDITION)
        assert trace.num_bytes == sum(path.stat().st_size for path in folder.glob("0*"))
        trace.add([make_request(count)])
        assert len(Trace.open(folder).request_table) == count + 1
        seen.add(count)
    # The last one was killed when `trace.json` had its name, before the folder was flushed.
    assert seen == {0, PER_ADDITION, 2 * PER_ADDITION}


def test_folder__that_was_moved_away_begins_anew(tmp_path: Path) -> None:
    trace = open_growing(tmp_path / "now")
    trace.add([make_request(0), make_request(1)])
    (tmp_path / "now").rename(tmp_path / "before")
    assert trace.is_moved()
    trace.add([make_request(2)])
    assert not trace.is_moved()
    assert len(Trace.open(tmp_path / "before").request_table) == 2
    assert len(Trace.open(tmp_path / "now").request_table) == 1


def test_folder__of_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("keep")
    with pytest.raises(TraceError, match=r"record=.*not empty.*notes\.txt"):
        open_growing(tmp_path)
    make_trace(tmp_path / "collected")
    with pytest.raises(TraceError, match="no server recorded"):
        open_growing(tmp_path / "collected")
    open_growing(tmp_path / "mine").add([make_request(0)])
    other = replace(make_spec(), revision="another")
    with pytest.raises(TraceError, match="revision.*Name another folder with record=PATH"):
        GrowingTrace(tmp_path / "mine", other)


def test_folder__has_one_writer(tmp_path: Path) -> None:
    first = open_growing(tmp_path)
    with pytest.raises(TraceError, match="another server records"):
        open_growing(tmp_path)
    first.close()
    open_growing(tmp_path)


def test_addition__without_a_router_of_a_layer_is_refused(tmp_path: Path) -> None:
    request = make_request(0)
    columns = {name: rows for name, rows in request.columns.items() if name != "experts.02"}
    with pytest.raises(TraceError, match="not every layer.*experts"):
        open_growing(tmp_path).add([replace(request, columns=columns)])


def test_folder__is_closed_to_other_users(tmp_path: Path) -> None:
    trace = open_growing(tmp_path / "new")
    assert trace.folder.stat().st_mode & 0o077 == 0
