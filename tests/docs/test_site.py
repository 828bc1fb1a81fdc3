"""The site builds without a warning and loads nothing from other hosts."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.pages import DOCS, ROOT

SOURCES = ("moecast", "predictors", "zoo", "runtime")
"""Packages whose docstrings are in the reference."""
LOADED = re.compile(
    r"<(?:script|img|iframe|source|link|audio|video)\b[^>]*?\b(?:src|srcset|href)=[\"']?"
    r"((?:https?:)?//[^\"'\s>]+)"
)
IMPORTED = re.compile(r"(?:url\(|@import\s+)[\"']?((?:https?:)?//[^\"')\s]+)")


def build(folder: Path) -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.executable).with_name("zensical")), "build", "--strict"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=240)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    shutil.copy(ROOT / "mkdocs.yml", folder)
    shutil.copytree(DOCS, folder / "docs")
    for name in SOURCES:
        (folder / name).symlink_to(ROOT / name)
    done = build(folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "site"


def test_site__loads_nothing_from_other_hosts(site: Path) -> None:
    loaded = {
        f"{path.relative_to(site)}: {address}"
        for pattern, suffixes in (
            (LOADED, (".html", ".svg")),
            (IMPORTED, (".html", ".css", ".svg")),
        )
        for path in site.rglob("*")
        if path.suffix in suffixes
        for address in pattern.findall(path.read_text())
    }
    assert not loaded


def test_site__describes_the_python_interface(site: Path) -> None:
    text = (site / "python" / "index.html").read_text()
    assert "BudgetError" in text, "the docstring of load is missing"
    assert "Source code in" not in text


def test_build__fails_on_a_broken_link(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "index.md").write_text("# Page\n\n[gone](gone.md)\n")
    (tmp_path / "mkdocs.yml").write_text("site_name: x\nnav:\n  - index.md\n")
    done = build(tmp_path)
    assert done.returncode != 0
    assert "page does not exist" in done.stderr
