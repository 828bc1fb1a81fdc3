"""Every command of the documentation has options that exist: it is parsed, and not run."""

import importlib
import re
import shlex
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import dropwhile, groupby
from pathlib import Path

import pytest

import configs.commands
from configs.program import run_program
from moecast.command import main
from tests.docs.pages import DOCS, FENCE, ROOT, CodeBlock, markdown_files, read_blocks

ACCEPT = "builtins:repr"
"""Runs in place of each command and does nothing with its configuration."""
SEPARATORS = {"&&", "||", "&", ";", "|"}
VARIABLE = re.compile(r"[A-Z_]+=")
PROMPT = re.compile(r"^\$ ", re.MULTILINE)
MODULE = re.compile(r"python -m ((?:benchmarks|tests|runtime|train|zoo)[\w.]*)")


def split_commands(block: CodeBlock) -> Iterator[list[str]]:
    """Yields the arguments of each command that is ours."""
    for line in PROMPT.sub("", block.text).replace("\\\n", " ").splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars="&;|")
        lexer.whitespace_split = True
        for separates, group in groupby(lexer, SEPARATORS.__contains__):
            words = list(dropwhile(VARIABLE.match, group))
            if not separates and is_ours(words):
                yield words


def is_ours(words: list[str]) -> bool:
    if words[:1] == ["moecast"]:
        return True
    return words[:2] == ["python", "-m"] and words[2] in (*configs.commands.PROGRAMS, "moecast")


LANGUAGES = ("console", "bash", "sh", "shell")
BLOCKS = [block for path in markdown_files() for block in read_blocks(path, *LANGUAGES)]
FOUND = {shlex.join(words): block for block in BLOCKS for words in split_commands(block)}
COMMANDS = sorted(FOUND.items())


@pytest.fixture(autouse=True)
def accepting(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    accept = partial(replace, run=ACCEPT, check=None, needs_run=False)
    programs = configs.commands.PROGRAMS.items()
    accepting = {program: tuple(map(accept, commands)) for program, commands in programs}
    monkeypatch.setattr(configs.commands, "PROGRAMS", accepting)
    monkeypatch.chdir(tmp_path)


def run(words: list[str]) -> int:
    program, *arguments = words if words[0] == "moecast" else words[2:]
    return main(arguments) if program == "moecast" else run_program(program, arguments)


@pytest.mark.parametrize(("text", "block"), COMMANDS, ids=[text for text, _ in COMMANDS])
def test_command__has_options_that_exist(text, block, capsys):
    assert run(shlex.split(text)) == 0, f"{block}: {capsys.readouterr().err}"


def test_command__an_unknown_option_is_found(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["moecast", "generate", "bugdet=50%"]) == 2
    assert "budget" in capsys.readouterr().err


def test_modules_of_the_documentation__exist() -> None:
    texts = [path.read_text() for path in markdown_files()]
    named = {module for text in texts for module in MODULE.findall(text)}
    assert not [module for module in named if importlib.util.find_spec(module) is None]


def test_options_in_the_text__exist() -> None:
    reference = (DOCS / "commands.md").read_text()
    known = set(re.findall(r"^\* `([\w.]+)[=`]", reference, re.MULTILINE))
    known |= set(re.findall(r"\[`(\w+)`\]\(#", reference))
    known |= {key.removeprefix("system.") for key in known}
    assert not {
        f"{path.relative_to(ROOT)}: {key}"
        for path in [ROOT / "README.md", *DOCS.rglob("*.md")]
        for text in re.findall(r"`([^`\n]+)`", FENCE.sub("", path.read_text()))
        if "(" not in text and not text.startswith("python -m ")
        for key in re.findall(r"(?:^|\s)(?:--)?([a-z]\w*(?:\.\w+)*)=(?!=)", text)
        if key not in known
    }
