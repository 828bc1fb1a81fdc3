"""The committed figures show the committed results."""

from pathlib import Path

from PIL import Image

from benchmarks.process import ROOT
from benchmarks.tables.figures import list_pages


def test_figures__are_those_of_the_committed_results() -> None:
    expected: dict[Path, str] = {}
    for folder, page in list_pages():
        for section in page.sections:
            if section.draw is not None:
                expected[folder / f"{section.name}.csv"] = section.csv().decode()
                assert (ROOT / folder / f"{section.name}.svg").stat().st_size < 200_000
        assert page.provenance is not None
        assert page.provenance.date is not None
        assert page.provenance.revision is not None
    for path, values in expected.items():
        assert (ROOT / path).read_text() == values, f"{path}: run `python -m benchmarks tables`"
    folders = {path.parent for path in expected}
    assert {path for folder in folders for path in (ROOT / folder).glob("*.csv")} == {
        ROOT / path for path in expected
    }


def test_picture__of_the_status_page_is_small() -> None:
    path = ROOT / "docs/images/status-page.png"
    assert path.stat().st_size < 200_000
    assert Image.open(path).width == 1200
