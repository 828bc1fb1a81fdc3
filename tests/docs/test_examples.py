"""The Python examples of the pages run, each page's blocks one after another."""

from pathlib import Path

import pytest

from tests.docs.pages import DOCS, read_blocks

TESTED_ELSEWHERE = {"clients.md", "quickstart.md", "tutorial.md"}
TESTED = [path for path in sorted(DOCS.rglob("*.md")) if path.name not in TESTED_ELSEWHERE]
PAGES = [path for path in TESTED if read_blocks(path, "python")]


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_page__its_examples_run(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    names = {"__name__": path.stem}
    for block in read_blocks(path, "python"):
        exec(compile(block.text, str(block), "exec"), names)
