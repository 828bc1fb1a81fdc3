"""YAML that is part of the program has the values that the strict reader gives it."""

import pytest

from predictors.typed_values import read_table, read_yaml
from tests.builders.processes import ROOT

FOLDERS = ("benchmarks", "configs", "predictors", "runtime", "train")
TABLES = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.yaml"))


@pytest.mark.parametrize("path", TABLES, ids=lambda path: str(path.relative_to(ROOT)))
def test_read_table__has_the_values_and_types_of_read_yaml(path) -> None:
    assert repr(read_table(path)) == repr(read_yaml(path.read_text()))


def test_read_table__refuses_a_key_that_is_given_twice(tmp_path) -> None:
    path = tmp_path / "table.yaml"
    path.write_text("a: 1e-3\nb: 2026-01-01\n")
    assert read_table(path) == {"a": 0.001, "b": "2026-01-01"}
    path.write_text("a: 1\na: 2\n")
    with pytest.raises(Exception, match="found a key twice"):
        read_table(path)
