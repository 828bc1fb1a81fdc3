"""The site builds without a warning and loads nothing from other hosts."""

import re
import shutil
import sys
from pathlib import Path

import pytest

from tests.builders.processes import run
from tests.docs.pages import DOCS, ROOT

SOURCES = ("moecast", "predictors", "zoo", "runtime")
"""Packages whose docstrings are in the reference."""
LOADED = re.compile(
    r"<(?:script|img|iframe|source|link|audio|video)\b[^>]*?\b(?:src|srcset|href)=[\"']?"
    r"((?:https?:)?//[^\"'\s>]+)"
)
IMPORTED = re.compile(r"(?:url\(|@import\s+)[\"']?((?:https?:)?//[^\"')\s]+)")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    shutil.copy(ROOT / "mkdocs.yml", folder)
    shutil.copytree(DOCS, folder / "docs")
    for name in SOURCES:
        (folder / name).symlink_to(ROOT / name)
    run(Path(sys.executable).with_name("zensical"), "build", "--strict", folder=folder, timeout=240)
    return folder / "site"


def test_site__loads_nothing_from_other_hosts(site: Path) -> None:
    found = []
    for pattern, suffixes in ((LOADED, (".html", ".svg")), (IMPORTED, (".html", ".css", ".svg"))):
        for path in (one for one in site.rglob("*") if one.suffix in suffixes):
            addresses = pattern.findall(path.read_text())
            found += [f"{path.relative_to(site)}: {address}" for address in addresses]
    assert not found


def test_site__describes_the_python_interface(site: Path) -> None:
    text = (site / "python" / "index.html").read_text()
    assert "BudgetError" in text, "the docstring of load is missing"
    assert "Source code in" not in text
