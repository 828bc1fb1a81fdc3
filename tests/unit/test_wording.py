"""Class names are unique, and docstrings begin with a sentence.

Read from the source, nothing of it is imported.
"""

import ast
from collections import defaultdict
from collections.abc import Iterator
from itertools import pairwise

from tests.builders.sources import PACKAGES, Source, sources

FRAGMENTS = {"How", "Of", "That", "What", "Whatever", "Where", "Which", "Who", "Whoever", "Whose"}
"""Words that begin a clause and not a sentence."""
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def read_sources() -> list[Source]:
    return list(sources(*PACKAGES, "benchmarks").values())


def docstrings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and text of the docstrings of modules, classes and functions."""
    for node in ast.walk(tree):
        if isinstance(node, DOCUMENTED) and (text := ast.get_docstring(node)):
            yield node.body[0].lineno, text


def field_docstrings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and text of the docstrings below fields and constants; of options, they are the help."""
    for node in ast.walk(tree):
        for pair in pairwise(node.body) if isinstance(node, ast.Module | ast.ClassDef) else ():
            match pair:
                case ast.Assign() | ast.AnnAssign(), ast.Expr(ast.Constant(str(text))) as below:
                    yield below.lineno, text.strip()


def test_classes__have_unique_names() -> None:
    places = defaultdict(set)
    for source in read_sources():
        for node in ast.walk(source.tree):
            if isinstance(node, ast.ClassDef):
                places[node.name].add(source.path)
    twice = {name: sorted(paths) for name, paths in places.items() if len(paths) > 1}
    assert not twice


def test_docstrings__are_no_fragments() -> None:
    offenders = {}
    for source in read_sources():
        for line, text in [*docstrings(source.tree), *field_docstrings(source.tree)]:
            if text.split()[0].strip(",:;'") in FRAGMENTS:
                offenders[text.splitlines()[0]] = f"{source.path}:{line}"
    assert not offenders


def test_docstrings__have_a_summary_on_one_line() -> None:
    offenders = {}
    for source in read_sources():
        for line, text in docstrings(source.tree):
            if text.splitlines()[1:2] not in ([], [""]):
                offenders[text.splitlines()[0]] = f"{source.path}:{line}"
    assert not offenders
