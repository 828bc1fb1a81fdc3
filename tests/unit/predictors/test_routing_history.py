"""The history of routing finds the last place with the same text, and what followed it."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from predictors import routing_history
from predictors.routing_history import FOLLOWING_WEIGHTS, NUM_FOLLOWING, RoutingHistory, find_match
from tests.builders.traces import make_spec

SPEC = make_spec()


def naive_match(tokens: list[int], newest: int, first: int) -> tuple[int, int]:
    for length in routing_history.MATCHED:
        ended = tokens[newest - length + 1 : newest + 1]
        for place in range(newest - 1, first + length - 2, -1):
            if newest - length + 1 >= 0 and tokens[place - length + 1 : place + 1] == ended:
                return place, length
    return -1, 0


@given(tokens=st.lists(st.integers(0, 2), min_size=1, max_size=30), first=st.integers(0, 8))
def test_find_match__is_the_last_place_of_the_longest_text(tokens: list[int], first: int) -> None:
    newest = len(tokens) - 1
    found = find_match(np.array(tokens), newest, first=first)
    assert found == naive_match(tokens, newest, first)


@given(steps=st.lists(st.integers(1, 9), min_size=1, max_size=12), seed=st.integers(0, 999))
@settings(max_examples=50, deadline=None)
def test_history__is_that_of_the_last_tokens(steps: list[int], seed: int) -> None:
    random = np.random.default_rng(seed)
    tokens: list[int] = []
    experts: list[np.ndarray] = []
    with pytest.MonkeyPatch.context() as patch:
        # Small, so that it is moved often.
        patch.setattr(routing_history, "WINDOW", 12)
        history = RoutingHistory(SPEC)
        for size in steps:
            new = random.integers(0, 3, size)
            chosen_TK = random.integers(0, SPEC.num_experts + 1, (size, SPEC.top_k))
            tokens += new.tolist()
            experts += list(chosen_TK)
            history.append(new)
            for layer in range(SPEC.num_layers):
                history.set_experts(layer, chosen_TK)
            newest = len(tokens) - 1
            match, length = naive_match(tokens, newest, max(0, newest - 12))
            assert history.matched_tokens <= length
            if history.matched_tokens < length:
                # The history moved, and the text before was beyond the window.
                continue
            expected_E = np.zeros(SPEC.num_experts + 1)
            if length:
                for weight, used_K in zip(
                    FOLLOWING_WEIGHTS, experts[match + 1 : match + 1 + NUM_FOLLOWING], strict=False
                ):
                    np.add.at(expected_E, used_K, weight)
            uses_E = history.uses_behind(1)
            np.testing.assert_allclose(uses_E, expected_E[: SPEC.num_experts], rtol=1e-5)


def test_history__without_the_same_text_names_nothing() -> None:
    history = RoutingHistory(SPEC)
    history.append(np.array([1, 2, 3]))
    history.set_experts(0, np.zeros((3, SPEC.top_k), np.int64))
    assert not history.uses_behind(0).any()
