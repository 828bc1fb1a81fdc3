"""What several tests of the zoo share."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.builders.entries import tiny_entry
from tests.builders.hub import FakeHub, fake_hub
from tests.builders.web import served
from tests.builders.zoos import Far
from zoo.catalog import WritableZoo
from zoo.entry import open_entry
from zoo.storage.folder import FolderStorage
from zoo.storage.hub import HubStorage


@pytest.fixture
def far(tmp_path: Path) -> Iterator[Far]:
    """A zoo with one entry behind a web server."""
    tiny_entry(tmp_path / "e")
    WritableZoo(FolderStorage(tmp_path / "far")).add(open_entry(tmp_path / "e"))
    with served(tmp_path / "far") as (address, site):
        yield address, site


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[HubStorage, FakeHub]]:
    """A zoo on a stand-in for the Hub, with a login, and what the stand-in holds."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_TOKEN", "hf_test")
    with fake_hub() as (address, repositories):
        yield HubStorage("publisher/zoo", endpoint=address), repositories
