"""JSON written in pieces is the JSON written at once."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.serving.api.responses import BATCH_ITEMS, json_pieces, to_json, write_json

SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
VALUES = st.recursive(
    SCALARS.filter(lambda value: value not in (float("inf"), float("-inf"))),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


def make_lazy(value: Any) -> Any:
    """The same value with iterators for lists."""
    if isinstance(value, dict):
        return {name: make_lazy(item) for name, item in value.items()}
    return map(make_lazy, value) if isinstance(value, list) else value


@given(VALUES)
def test_pieces__join_to_the_text_of_json(value: Any) -> None:
    text = json.dumps(value, separators=(",", ":"))
    assert to_json(value) == to_json(make_lazy(value)) == text
    assert write_json(value) == write_json(make_lazy(value)) == text.encode()


@pytest.mark.parametrize("length", [0, 1, BATCH_ITEMS, BATCH_ITEMS + 1, 10 * BATCH_ITEMS])
def test_iterator__makes_few_items_at_a_time(length: int) -> None:
    num_made = 0

    def items() -> Any:
        nonlocal num_made
        for number in range(length):
            num_made += 1
            yield {"number": number}

    written = ""
    for piece in json_pieces({"content": items()}):
        written += piece
        assert num_made - written.count("number") <= BATCH_ITEMS
    assert [item["number"] for item in json.loads(written)["content"]] == [*range(length)]


def test_not_a_number__is_an_error() -> None:
    for value in (float("nan"), [float("inf")], {"a": object()}):
        with pytest.raises((ValueError, TypeError)):
            write_json(value)
