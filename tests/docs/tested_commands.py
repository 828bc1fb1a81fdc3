"""Commands of pages that tests run, and what may be changed in them for a test.

A block of such commands stands below `<!-- NAME: FILE runs these ... -->`.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from tests.docs.pages import DOCS

PLACEHOLDERS = (
    "/shared", "HEAD:6379", "BUCKET", "127.0.0.1:8000", "127.0.0.1:9000", "127.0.0.1:9090",
    "127.0.0.1:4318", "port=8000", "moecast ",
)  # fmt: skip
"""Names of places that differ from machine to machine: a test may put its own in their place."""
BLOCK = re.compile(
    r"<!-- ([\w-]+): (\S+\.py) runs th(?:is|ese)\b[^\n]*-->\n```console\n(.*?)^```", re.M | re.S
)
CONSOLE = re.compile(r"^```console\n(.*?)^```", re.MULTILINE | re.DOTALL)
HEADING = re.compile(r"^(#+) (.+)$", re.MULTILINE)

WHOLE = ("distributed.md", "deployment.md", "monitoring.md")
PAGES = {**dict.fromkeys(WHOLE), "zoo.md": "Object stores"}
"""Pages whose commands tests run; of one, a section."""


@dataclass(frozen=True)
class TestedCommand:
    """A command of a page."""

    __test__ = False

    page: str
    text: str

    def adapt(self, replaced: Mapping | None = None, *, after: Mapping | None = None) -> str:
        """Returns the command for a test that runs it.

        Args:
            replaced: what stands for placeholders.
            after: options to insert after words of the command; those that are there stay.
        """
        text = self.text
        for placeholder, own in (replaced or {}).items():
            assert placeholder in PLACEHOLDERS, f"{placeholder} is part of the documented command"
            text = text.replace(placeholder, str(own))
        for words, options in (after or {}).items():
            assert words in text, f"{self.page}: {words!r} is not in {text!r}"
            text = text.replace(words, f"{words} {options}")
        return text


@dataclass(frozen=True)
class TestedBlock:
    __test__ = False

    page: str
    name: str
    file: str
    """The file of tests, below the repository, that runs the commands."""
    commands: tuple[TestedCommand, ...]


def read_section(page: str, heading: str | None = None) -> str:
    """Returns the text of a page of docs/, or of one of its sections."""
    text = (DOCS / page).read_text()
    if heading is None:
        return text
    marks = [(found.start(), len(found[1]), found[2]) for found in HEADING.finditer(text)]
    ((begin, level, _),) = [mark for mark in marks if mark[2] == heading]
    ends = [start for start, other, _ in marks if start > begin and other <= level]
    return text[begin : min(ends, default=len(text))]


def find_blocks(page: str, text: str) -> list[TestedBlock]:
    """Returns the blocks of a page's text that name the tests which run them."""
    blocks = []
    for name, file, body in BLOCK.findall(text):
        commands = tuple(TestedCommand(page, line) for line in body.splitlines())
        blocks.append(TestedBlock(page, name, file, commands))
    return blocks


def find_untested(page: str, text: str) -> list[str]:
    """Returns the commands in a page's text that no test is named for."""
    tested = {command.text for block in find_blocks(page, text) for command in block.commands}
    lines = [line for body in CONSOLE.findall(text) for line in body.splitlines()]
    return [line for line in lines if line not in tested]


def read_block(page: str, name: str) -> tuple[TestedCommand, ...]:
    """Returns the commands of a block of a page of docs/."""
    (block,) = [one for one in find_blocks(page, read_section(page)) if one.name == name]
    return block.commands


def read_tested_blocks() -> list[TestedBlock]:
    """Returns all blocks of `PAGES`."""
    found = (find_blocks(page, read_section(page, heading)) for page, heading in PAGES.items())
    return [block for blocks in found for block in blocks]
