"""A test that hangs is ended, and says where each of its threads was."""

import pytest

from tests.conftest import pytest_collection_modifyitems


def test_timeout__a_test_without_one_is_refused(request):
    request.applymarker(pytest.mark.timeout(0))
    with pytest.raises(AssertionError, match="a test without a limit may hang"):
        pytest_collection_modifyitems(request.config, [request.node])
