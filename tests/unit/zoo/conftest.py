"""What several tests of the zoo share."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.builders.entries import tiny_entry
from tests.builders.web import served
from tests.builders.zoos import Far
from zoo.catalog import WritableZoo
from zoo.entry import open_entry
from zoo.storage.folder import FolderStorage


@pytest.fixture
def far(tmp_path: Path) -> Iterator[Far]:
    """A zoo with one entry behind a web server."""
    tiny_entry(tmp_path / "e")
    WritableZoo(FolderStorage(tmp_path / "far")).add(open_entry(tmp_path / "e"))
    with served(tmp_path / "far") as (address, site):
        yield address, site
