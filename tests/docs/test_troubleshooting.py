"""The messages that the page of symptoms quotes are messages of the code."""

import ast
import re
from collections.abc import Iterator

import pytest

from tests.builders.sources import sources
from tests.docs.pages import DOCS

PAGE = DOCS / "troubleshooting.md"


def quoted_messages() -> list[str]:
    """Returns what stands in backticks in the first column and has several words."""
    symptoms = re.findall(r"^\| ([^|]+) \|", PAGE.read_text(), re.MULTILINE)
    quoted = [text for symptom in symptoms for text in re.findall(r"`([^`]+)`", symptom)]
    return [text for text in quoted if text.count(" ") >= 2 and "=" not in text]


def literals(tree: ast.Module) -> Iterator[str]:
    """Yields the texts of a module; a value inside one becomes three dots."""
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            parts = (one.value if isinstance(one, ast.Constant) else "..." for one in node.values)
            yield "".join(map(str, parts))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


@pytest.fixture(scope="module")
def texts() -> str:
    trees = [source.tree for source in sources("predictors", "zoo", "runtime").values()]
    return "\n".join(text for tree in trees for text in literals(tree))


@pytest.mark.parametrize("message", quoted_messages())
def test_symptom__is_a_message_of_the_code(message: str, texts: str) -> None:
    assert message in texts
