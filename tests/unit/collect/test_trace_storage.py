"""One contract for every storage of a trace: a folder, memory, an S3 bucket."""

import shutil
import sys
from collections.abc import Iterator
from functools import partial
from unittest.mock import create_autospec

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from collect.errors import TraceError
from collect.traces import Trace, TraceWriter
from collect.traces.manifest import TracePlan, open_writable_storage, read_manifest
from collect.traces.writer import RECORD, committed_units
from predictors.errors import DiskFullError
from predictors.files import cache_folder
from tests.builders.processes import run_python
from tests.builders.stores import s3_bucket
from tests.builders.traces import make_plan, make_spec, make_trace, unit_content
from tests.builders.web import served
from zoo.errors import StorageError, UnreachableError
from zoo.storage.base import FileStorage
from zoo.storage.folder import FolderStorage
from zoo.storage.remote import ObjectStorage


@pytest.fixture(params=["folder", "memory", "s3"])
def storage(request, tmp_path, monkeypatch) -> Iterator[FileStorage]:
    if request.param == "s3":
        with s3_bucket(tmp_path.name, monkeypatch) as bucket:
            yield open_writable_storage(f"{bucket}/traces/one")
    else:
        places = {"folder": tmp_path / "far", "memory": f"memory://{tmp_path.name}"}
        yield open_writable_storage(places[request.param])


def write(storage: FileStorage, plan: TracePlan, units: list[int]) -> TraceWriter:
    writer = TraceWriter(storage, plan, joins=True)
    for unit in units:
        writer.write(unit, *unit_content(plan, unit))
    return writer


def test_trace__is_the_same_in_every_storage_from_several_writers(storage, tmp_path) -> None:
    alone = make_trace(tmp_path / "alone", num_units=4)
    plan = make_plan(make_spec(), num_units=4)
    one, other = write(storage, plan, [2]), write(storage, plan, [0])
    with pytest.raises(TraceError, match=r"is not finished: 2 of 4 parts"):
        Trace.open(storage)
    assert one.missing() == other.missing() == [1, 3]
    write(storage, plan, [3, 1])
    for trace in (*[writer.finish() for writer in (one, other)], Trace.open(storage.address)):
        assert (trace.digest, trace.where) == (alone.digest, storage.address)
        assert (trace.column("gate_input", 2)[:] == alone.column("gate_input", 2)[:]).all()
    assert storage.names() == sorted(path.name for path in (tmp_path / "alone").iterdir())


def test_trace__damage_is_refused(storage: FileStorage) -> None:
    plan = make_plan(make_spec())
    write(storage, plan, [0, 1]).finish()
    shutil.rmtree(cache_folder("traces"), ignore_errors=True)
    (victim, *_) = (name for name in storage.names() if name.endswith(".arrow"))
    data = bytearray(storage.read(victim))
    data[1_000] ^= 1
    storage.write(victim, bytes(data))
    with pytest.raises(TraceError, match=rf"{victim}.* is damaged: .*expected"):
        Trace.open(storage)
    with pytest.raises(TraceError, match=rf"{victim} is damaged.*Delete"):
        TraceWriter(storage, plan)


def test_copy__is_made_once_and_made_good(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = ObjectStorage(f"memory://{tmp_path.name}")
    first = write(storage, make_plan(make_spec()), [0, 1]).finish()
    stream = create_autospec(ObjectStorage.stream, side_effect=ObjectStorage.stream)
    monkeypatch.setattr(ObjectStorage, "stream", stream)
    assert Trace.open(storage).path == first.path
    stream.assert_not_called()
    (victim, *_) = first.path.glob("*.arrow")
    victim.write_bytes(victim.read_bytes()[:-1])
    assert Trace.open(storage).digest == first.digest
    stream.assert_called_once_with(storage, victim.name)
    assert Trace.open(first.path).digest == first.digest, "the copy is a complete trace"


def test_copy__needs_room_on_the_disk(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = write(ObjectStorage(f"memory://{tmp_path.name}"), make_plan(make_spec()), [0, 1])
    monkeypatch.setattr(FolderStorage, "free_bytes", lambda _: 10)
    with pytest.raises(DiskFullError, match=r"needs .* bytes, 10 are free\. Set MOECAST_CACHE"):
        writer.finish()


def test_object_storage__without_its_library_names_the_extra(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    with pytest.raises(StorageError, match=r"pip install 'moecast\[gcs\]'"):
        read_manifest("gs://bucket/trace")


def test_object_storage__without_credentials_names_the_address(tmp_path, monkeypatch) -> None:
    with s3_bucket(tmp_path.name, monkeypatch) as bucket:
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            monkeypatch.delenv(name)
        monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
        storage = ObjectStorage(f"{bucket}/without")
        for access in (partial(storage.read, "x"), storage.names, partial(storage.size, "x")):
            with pytest.raises(UnreachableError, match=r"s3://.*/without.*your credentials"):
                access()


def test_trace__is_read_from_a_web_server_but_not_written_to_it(tmp_path) -> None:
    trace = make_trace(tmp_path / "far")
    with served(tmp_path / "far") as (address, _site):
        copied = Trace.open(address)
        with pytest.raises(TraceError, match="cannot be written to http://"):
            TraceWriter(address, make_plan(make_spec()))
    assert copied.digest == trace.digest
    assert copied.path == cache_folder("traces") / trace.digest[:32]


WRITE = """
import os, sys
import s3fs
from tests.builders.traces import make_plan, make_spec, unit_content
from collect.traces import TraceWriter
plan = make_plan(make_spec(), num_units=6, requests_per_unit=2)
children = []
for number in range(3):
    if not (child := os.fork()):
        writer = TraceWriter(sys.argv[1], plan, joins=True)
        for unit in range(number, 6, 3):
            writer.write(unit, *unit_content(plan, unit))
        if not writer.missing():
            writer.finish()
        os._exit(0)
    children.append(child)
assert not any(os.waitpid(child, 0)[1] for child in children)
"""
"""Children of one process: importing takes longer than writing."""


@pytest.mark.parametrize("storage", ["folder", "s3"], indirect=True)
def test_trace__three_processes_write_at_once(storage: FileStorage, tmp_path) -> None:
    alone = make_trace(tmp_path / "alone", num_units=6, requests_per_unit=2)
    where = f"{storage.address}/new"
    run_python("-c", WRITE, where)
    plan = read_manifest(where).plan
    assert len(committed_units(where, plan)) == 6
    assert TraceWriter(where, plan).finish().digest == alone.digest


@settings(max_examples=25)
@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from(["write", "finish", "open"]))))
def test_writers__in_any_order_lose_nothing_and_finish_once(tmp_path_factory, moves) -> None:
    folder = tmp_path_factory.mktemp("trace")
    plan = make_plan(make_spec(num_layers=1), num_units=4, requests_per_unit=1)
    written: set[int] = set()
    for unit, move in moves:
        writer = TraceWriter(folder, plan, joins=move != "open")
        if move == "write":
            writer.write(unit, *unit_content(plan, unit))
            written.add(unit)
        elif move == "finish" and len(written) == 4:
            writer.finish()
        assert set(committed_units(folder, plan)) == written
        assert writer.missing() == sorted({0, 1, 2, 3} - written)
    TraceWriter(folder, plan)
    if read_manifest(folder).complete:
        assert not list(folder.glob(f"*{RECORD}"))
