"""The files that hosts and contributors look for are there, valid and linked."""

import re
import tomllib

import pytest
import yaml

from tests.docs.pages import ROOT, markdown_files, read_links

CITATION = yaml.safe_load((ROOT / "CITATION.cff").read_text())
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_citation__is_of_this_version() -> None:
    assert (CITATION["title"], str(CITATION["version"])) == (PROJECT["name"], PROJECT["version"])
    assert CITATION["license"] == PROJECT["license"]


def test_citation__has_every_paper() -> None:
    cited = {paper["url"] for paper in CITATION["references"]}
    papers = (ROOT / "docs/papers.md").read_text()
    assert cited == set(re.findall(r"\((https://arxiv\.org/abs/[\d.]+)\)", papers))
    for paper in CITATION["references"]:
        assert paper["type"] == "article"
        assert paper["title"] in papers
        authors = [f"{one['given-names']} {one['family-names']}" for one in paper["authors"]]
        assert ", ".join(authors) in papers


@pytest.mark.parametrize("name", ["CONTRIBUTING.md", "SECURITY.md", "CITATION.cff", "LICENSE"])
def test_file__is_there_and_linked(name: str) -> None:
    target = ROOT / name
    assert target.is_file()
    others = [path for path in markdown_files() if path != target]
    assert target in [(page.parent / to).resolve() for page in others for to in read_links(page)]


def test_targets_of_make__exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    texts = [path.read_text() for path in markdown_files()]
    assert {name for text in texts for name in re.findall(r"`make ([a-z-]+)", text)} <= targets


def test_extras_of_the_documentation__exist() -> None:
    named = {
        extra.strip()
        for path in markdown_files()
        if path.name != "CHANGELOG.md"  # it names what went, too
        for extras in re.findall(r"moecast\[([a-z0-9, ]+)\]", path.read_text())
        for extra in extras.split(",")
    }
    assert named <= PROJECT["optional-dependencies"].keys()


@pytest.mark.parametrize(("page", "least"), [("SECURITY.md", 30), ("tests/README.md", 100)])
def test_page__names_tests_that_exist(page: str, least: int) -> None:
    """A reference is `FILE::NAME` below tests/, or `::NAME` of the file before."""
    text = (ROOT / page).read_text()
    references = re.findall(r"`((?:[\w/]+\.py)?)(?:::(\w+)[^`]*)?`", text)
    missing, file = [], ""
    for path, name in references:
        file = path or file
        text = (ROOT / "tests" / file).read_text() if file else ""
        # Hypothesis makes the test case of a class of rules.
        if name and not re.search(rf"(?:def|class) {name.removeprefix('Test')}\b", text):
            missing.append(f"{file}::{name}")
    assert len(references) > least
    assert not missing
