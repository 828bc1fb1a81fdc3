"""The generated parts of the documentation are those of the present code."""

import pytest

from tests.docs.generate import SECTIONS, split_page


@pytest.mark.parametrize("name", SECTIONS)
def test_section__is_up_to_date(name: str) -> None:
    _, _, content, _ = split_page(name)
    _, render = SECTIONS[name]
    assert content == render(), "run `make docs`, or `python -m tests.docs.generate`"
