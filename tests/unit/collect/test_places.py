"""One contract for every place of a trace: a folder, memory, an S3 bucket."""

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from collect.errors import DiskSpaceError, TraceError
from collect.traces import Trace, TraceWriter
from collect.traces.copies import copies_folder
from collect.traces.manifest import TracePlan, read_manifest
from collect.traces.places import FolderPlace, ObjectPlace, Place, place_of
from collect.traces.writer import RECORD, committed
from tests.builders.stores import s3_bucket
from tests.builders.traces import make_plan, make_spec, make_trace, unit_content

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(params=["folder", "memory", "s3"])
def place(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Place]:
    if request.param == "folder":
        (tmp_path / "far").mkdir()
        yield place_of(tmp_path / "far")
    elif request.param == "memory":
        yield place_of(f"memory://{tmp_path.name}")
    else:
        with s3_bucket(tmp_path.name, monkeypatch) as bucket:
            yield place_of(f"{bucket}/traces/one")


def write(place: Place, plan: TracePlan, units: list[int]) -> TraceWriter:
    writer = TraceWriter(place, plan, joins=True)
    for unit in units:
        writer.write(unit, *unit_content(plan, unit))
    return writer


def test_place__files_are_whole_or_not_there(place: Place, tmp_path: Path) -> None:
    assert place.names() == []
    assert place.size("a") is None
    with pytest.raises(FileNotFoundError):
        place.read("a")
    place.write("a", b"one")
    place.write("a", b"three")
    assert place.read("a") == b"three"
    assert place.size("a") == 5
    assert place.create("b", b"first")
    assert not place.create("b", b"second"), "of two that begin, one does"
    assert place.read("b") == b"first"

    def fail() -> None:
        with place.sink("c") as file:
            file.write(b"part")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert place.names() == ["a", "b"]
    with place.sink("c") as file:
        file.write(b"whole")
    place.fetch("c", tmp_path / "here")
    assert (tmp_path / "here").read_bytes() == b"whole"
    place.remove("a")
    place.remove("a")
    assert place.names() == ["b", "c"]


def test_trace__is_the_same_wherever_and_by_how_many_it_is_written(
    place: Place, tmp_path: Path
) -> None:
    alone = make_trace(tmp_path / "alone", num_units=4)
    plan = make_plan(make_spec(), num_units=4)
    one, other = write(place, plan, [2]), write(place, plan, [0])
    with pytest.raises(TraceError, match=r"is not finished: 2 of 4 parts"):
        Trace.open(place)
    assert one.missing() == other.missing() == [1, 3]
    write(place, plan, [3, 1])
    made = [writer.finish() for writer in (one, other)]
    for trace in (*made, Trace.open(place.where)):
        assert trace.digest == alone.digest
        assert trace.where == place.where
        assert (trace.column("gate_input", 2)[:] == alone.column("gate_input", 2)[:]).all()
    assert place.names() == sorted(path.name for path in (tmp_path / "alone").iterdir())


def test_trace__what_was_deleted_is_made_again(place: Place) -> None:
    plan = make_plan(make_spec())
    write(place, plan, [0, 1])
    (victim,) = (name for name in place.names() if name.startswith("00001-") and "arrow" in name)
    place.remove(victim)
    writer = TraceWriter(place, plan)
    assert writer.missing() == [1]
    write(place, plan, [1])
    assert writer.finish().num_tokens == 2 * 20 * 10


def test_trace__of_another_plan_is_refused(place: Place) -> None:
    write(place, make_plan(make_spec()), [0])
    with pytest.raises(TraceError, match="holds another trace"):
        TraceWriter(place, make_plan(make_spec(), seed=1), joins=True)


def test_trace__damage_is_refused(place: Place) -> None:
    plan = make_plan(make_spec())
    write(place, plan, [0, 1]).finish()
    shutil.rmtree(copies_folder(), ignore_errors=True)
    (victim, *_) = (name for name in place.names() if name.endswith(".arrow"))
    data = bytearray(place.read(victim))
    data[1_000] ^= 1
    place.write(victim, bytes(data))
    with pytest.raises(TraceError, match=rf"{victim} is damaged: sha256"):
        Trace.open(place)
    with pytest.raises(TraceError, match=rf"{victim} is damaged"):
        TraceWriter(place, plan)


def test_copy__is_made_once_and_made_good(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = ObjectPlace(f"memory://{tmp_path.name}")
    first = write(place, make_plan(make_spec()), [0, 1]).finish()
    fetched: list[str] = []
    real = ObjectPlace.fetch

    def counted(self: ObjectPlace, name: str, path: Path) -> None:
        fetched.append(name)
        real(self, name, path)

    monkeypatch.setattr(ObjectPlace, "fetch", counted)
    assert Trace.open(place).path == first.path
    assert fetched == []
    (victim, *_) = first.path.glob("*.arrow")
    victim.write_bytes(victim.read_bytes()[:-1])
    assert Trace.open(place).digest == first.digest
    assert fetched == [victim.name]
    assert Trace.open(first.path).digest == first.digest, "the copy is a trace of its own"


def test_copy__without_room_is_told_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = ObjectPlace(f"memory://{tmp_path.name}")
    writer = write(place, make_plan(make_spec()), [0, 1])
    monkeypatch.setattr(FolderPlace, "free_bytes", lambda _: 10)
    with pytest.raises(DiskSpaceError, match=r"needs .* bytes, 10 are free\. Set MOECAST_CACHE"):
        writer.finish()


def test_object_place__without_its_library_names_the_extra(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    with pytest.raises(TraceError, match=r"pip install 'moecast\[gcs\]'"):
        place_of("gs://bucket/trace")


WRITE = """
import sys
from tests.builders.traces import make_plan, make_spec, unit_content
from collect.traces import TraceWriter
plan = make_plan(make_spec(), num_units=12, requests_per_unit=2)
writer = TraceWriter(sys.argv[1], plan, joins=True)
for unit in range(12):
    if unit % 3 == int(sys.argv[2]):
        writer.write(unit, *unit_content(plan, unit))
if not writer.missing():
    writer.finish()
"""


@pytest.mark.parametrize("kind", ["folder", "s3"])
def test_trace__three_processes_write_at_once(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = make_trace(tmp_path / "alone", num_units=12, requests_per_unit=2)

    def together(where: str) -> None:
        processes = [
            subprocess.Popen([sys.executable, "-c", WRITE, where, str(number)], cwd=ROOT)
            for number in range(3)
        ]
        assert [process.wait(120) for process in processes] == [0, 0, 0]
        plan = read_manifest(where).plan
        assert len(committed(where, plan)) == 12
        assert TraceWriter(where, plan).finish().digest == alone.digest

    if kind == "folder":
        together(str(tmp_path / "far"))
    else:
        with s3_bucket(tmp_path.name, monkeypatch) as bucket:
            together(f"{bucket}/one")


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from(["write", "finish", "open"]))))
def test_writers__in_any_order_lose_nothing_and_finish_once(
    tmp_path_factory: pytest.TempPathFactory, moves: list[tuple[int, str]]
) -> None:
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
        assert set(committed(folder, plan)) == written
        assert writer.missing() == sorted({0, 1, 2, 3} - written)
    TraceWriter(folder, plan)
    if read_manifest(folder).complete:
        assert not list(folder.glob(f"*{RECORD}"))
