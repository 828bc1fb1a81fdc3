"""Nothing waits for the disk: what was written is there after a kill without it, too."""

import os

import pytest


@pytest.fixture(autouse=True)
def no_waits_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda _: None)
