"""The commands of the pages on engines are those that the tests of this run have run."""

import pytest

from tests.docs.tested_commands import OUTCOMES, RUN, find_not_run, read_tested_blocks

pytestmark = pytest.mark.engines


def test_pages__show_no_command_that_was_not_run() -> None:
    """Blocks are judged whose file's tests have all passed: others may have stopped before."""
    judged, missing = find_not_run(read_tested_blocks(), outcomes=OUTCOMES, run=RUN)
    if not judged:
        pytest.skip("the tests that run commands of pages were skipped, failed or not selected")
    assert not missing
