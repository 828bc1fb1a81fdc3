"""The pages on engines show commands that tests run, and nothing else."""

import re

import pytest

from tests.docs import tested_commands as tested
from tests.docs.pages import ROOT

EXAMPLE = """
<!-- one: tests/engines/test_slurm.py runs this on a cluster -->
```console
squeue --me
```
```console
moecast train
```
"""


@pytest.mark.parametrize("page", tested.PAGES)
def test_page__names_the_tests_of_every_command(page: str) -> None:
    assert not tested.find_untested(page, tested.read_section(page, tested.PAGES[page]))


@pytest.mark.parametrize(
    "block", tested.read_tested_blocks(), ids=lambda block: f"{block.page}:{block.name}"
)
def test_block__is_read_by_the_file_that_it_names(block) -> None:
    text = (ROOT / block.file).read_text()
    for builder in re.findall(r"^from (tests\.builders\.ray_nodes) import", text, re.MULTILINE):
        text += (ROOT / f"{builder.replace('.', '/')}.py").read_text()
    assert f'"{block.name}"' in text
    assert f'"{block.page}"' in text
    assert "from tests.docs.tested_commands import" in text


def test_names__are_unique_in_a_page() -> None:
    names = [(block.page, block.name) for block in tested.read_tested_blocks()]
    assert len(set(names)) == len(names)
    assert len(names) >= 10


def test_command__without_tests_is_found() -> None:
    assert tested.find_untested("a.md", EXAMPLE) == ["moecast train"]


def test_adapt__changes_placeholders_only() -> None:
    command = tested.TestedCommand("a.md", "moecast collect output=/shared/trace")
    adapted = command.adapt({"/shared": "/tmp/x"}, after={"moecast collect": "seed=1"})
    assert adapted == "moecast collect seed=1 output=/tmp/x/trace"
    with pytest.raises(AssertionError, match="part of the documented command"):
        command.adapt({"collect": "train"})
    with pytest.raises(AssertionError, match="is not in"):
        command.adapt(after={"moecast train": "seed=1"})
