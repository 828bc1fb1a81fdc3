"""A recording that is killed goes on with nothing torn, lost or doubled."""

import contextlib
from pathlib import Path

import datasets
import pytest

from collect.errors import TraceError
from collect.plan import recording_settings
from collect.record import collect
from collect.traces import Trace, TraceWriter
from runtime.config import ModelConfig
from tests.builders.killed_writers import SPEC
from tests.builders.processes import run_python
from tests.builders.recordable import letters_data, recordable
from tests.builders.traces import make_trace


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def test_writer__killed_at_every_disk_operation_resumes(tmp_path: Path) -> None:
    num_killed = int(run_python("-m", "tests.builders.killed_writers", tmp_path).stdout)
    # trace.json, two units (data, requests, record), two JSON files, trace.json: each file is
    # fsynced, renamed (linked, the first), and its folder fsynced.
    assert num_killed == 3 * (1 + 2 * 3 + 3)
    whole = content(tmp_path / "whole")
    for number in range(num_killed):
        folder = tmp_path / str(number)
        assert_no_part_is_taken_for_the_whole(folder, num_rows=2 * 3 * 10)
        make_trace(folder, spec=SPEC, requests_per_unit=3)
        assert content(folder) == whole, f"killed before disk operation {number}"


def assert_no_part_is_taken_for_the_whole(folder: Path, *, num_rows: int) -> None:
    # Without state.json it is no data set yet.
    with contextlib.suppress(FileNotFoundError):
        assert len(datasets.load_from_disk(str(folder))) == num_rows
    try:
        assert Trace.open(folder).num_tokens == num_rows
    except TraceError as error:
        assert "moecast collect" in str(error)  # noqa: PT017


def record(home: Path, folder: Path) -> Trace:
    """A trace of four work units, one prompt each."""
    data = letters_data(home, count=4, new_tokens=8)
    model = ModelConfig(name="tiny", id=str(home / "model"), dtype="float32")
    settings = recording_settings(data, shard_bytes=1, temperature=1.0)
    return collect(model, data, folder=folder, settings=settings)


def test_collect__interrupted_while_recording_resumes(tmp_path, monkeypatch) -> None:
    recordable(tmp_path / "model")
    record(tmp_path, tmp_path / "whole")
    folder, write = tmp_path / "cut", TraceWriter.write

    def stop_at_two(writer: TraceWriter, unit: int, *rows) -> int:
        if unit == 2:
            raise KeyboardInterrupt
        return write(writer, unit, *rows)

    with monkeypatch.context() as patch:
        patch.setattr(TraceWriter, "write", stop_at_two)
        with pytest.raises(KeyboardInterrupt):
            record(tmp_path, folder)
    with pytest.raises(TraceError, match="not finished"):
        Trace.open(folder)
    written = {path.name: path.stat().st_mtime_ns for path in folder.glob("*.requests.json")}
    record(tmp_path, folder)
    assert content(folder) == content(tmp_path / "whole")
    kept = {name: (folder / name).stat().st_mtime_ns for name in written}
    assert kept == written, "what has its record is not recorded again"
    assert len(written) == 2
