"""The test of the pages' commands comes last, and learns which tests have passed."""

from pathlib import Path

import pytest

from tests.docs.tested_commands import OUTCOMES

LAST = Path(__file__).with_name("test_pages.py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path == LAST)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call" or report.outcome != "passed":
        file = report.nodeid.partition("::")[0]
        OUTCOMES.setdefault(file, set()).add(report.outcome)
