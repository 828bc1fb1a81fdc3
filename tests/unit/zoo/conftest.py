"""What several tests of the zoo share."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.builders.entries import tiny_entry
from tests.builders.hub import FakeHub, fake_hub
from tests.builders.web import Site, served
from tests.builders.zoos import Refused, publish, zoo
from zoo.storage.hub import HubStorage


@pytest.fixture(autouse=True)
def no_waits_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test pulls the plug: what was written is there after a kill without it, too."""
    monkeypatch.setattr(os, "fsync", lambda _: None)


@pytest.fixture
def entry(tmp_path: Path) -> Path:
    """The folder of an entry."""
    tiny_entry(tmp_path / "e")
    return tmp_path / "e"


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Refused:
    def run(*arguments: object) -> str:
        capsys.readouterr()
        assert zoo(*arguments) == 2
        return capsys.readouterr().err

    return run


@pytest.fixture
def far(tmp_path: Path) -> Iterator[Site]:
    """A zoo with one entry behind a web server."""
    publish(tmp_path / "far")
    with served(tmp_path / "far") as (_, site):
        yield site


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[HubStorage, FakeHub]]:
    """A zoo on a stand-in for the Hub, with a login, and what the stand-in holds."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_TOKEN", "hf_test")
    with fake_hub() as (address, repositories):
        yield HubStorage("publisher/zoo", endpoint=address), repositories
