"""Every link, image and anchor leads somewhere, and every page is in the navigation."""

from pathlib import Path
from urllib.parse import unquote

import pytest

from tests.docs.pages import DOCS, ROOT, markdown_files, read_anchors, read_links, read_nav

IMAGES = {".svg", ".png", ".jpg", ".webp"}


def broken_links(path: Path) -> list[str]:
    broken = []
    for link in read_links(path):
        name, _, anchor = unquote(link).partition("#")
        target = path if not name else path.parent / name
        if not target.exists():
            broken.append(link)
        elif anchor and target.suffix == ".md" and anchor not in read_anchors(target):
            broken.append(f"{link} (no such heading)")
    return broken


@pytest.mark.parametrize("path", markdown_files(), ids=lambda path: str(path.relative_to(ROOT)))
def test_links__lead_to_files_and_headings(path: Path) -> None:
    assert not broken_links(path)


def test_links__a_broken_one_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text('# Top\n[a](#top) [b](#bottom) ![c](no.svg) <img src="gone.png"> `[d](x)`\n')
    assert broken_links(page) == ["#bottom (no such heading)", "no.svg", "gone.png"]


def test_navigation__has_every_page_once() -> None:
    assert sorted(read_nav()) == sorted(str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md"))


def test_images__are_shown_by_a_page() -> None:
    shown = {
        (path.parent / unquote(link.partition("#")[0])).resolve()
        for path in markdown_files()
        for link in read_links(path)
    }
    images = {path.resolve() for path in (DOCS / "images").rglob("*") if path.suffix in IMAGES}
    assert not {str(path.relative_to(DOCS)) for path in images - shown}
