"""Drafts are verified where that pays, and never cost more than a small share of the time."""

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.generation.drafting import ALLOWED_LOSS, LONGEST, DraftPace


def run(pace: DraftPace, *, acceptance, extra, num_tokens=400, seed=0) -> tuple[float, float]:
    """Returns the seconds of that many tokens with drafts and without, at .05 s a plain step."""
    source = random.Random(seed)
    seconds = tokens = 0.0
    while tokens < num_tokens:
        n, accepted = pace.choose(20), 0
        while accepted < n and source.random() < acceptance:
            accepted += 1
        step = 0.05 + n * extra
        pace.record(step, drafted=n, accepted=accepted)
        seconds += step
        tokens += 1 + accepted
    return seconds, tokens * 0.05


def test_pace__of_text_that_repeats_is_several_times_as_fast() -> None:
    with_drafts, without = run(DraftPace(), acceptance=1.0, extra=0.01)
    assert with_drafts < without / 2
    assert DraftPace().choose(9) == 0, "nothing is known of a plain step's time"


@given(
    acceptance=st.floats(0, 1), extra=st.floats(0, 0.2), seed=st.integers(0, 99),
    num_tokens=st.integers(5, 600),
)  # fmt: skip
@settings(max_examples=150, deadline=None)
def test_pace__never_costs_more_than_it_may(acceptance, extra, seed, num_tokens) -> None:
    """One draft, before its cost is known, may cost what was not expected of it."""
    how = {"acceptance": acceptance, "extra": extra, "num_tokens": num_tokens, "seed": seed}
    with_drafts, without = run(DraftPace(), **how)
    surprise = LONGEST * max(0.0, extra - 0.35 * 0.05)
    assert with_drafts <= without * (1 + ALLOWED_LOSS) / (1 - ALLOWED_LOSS) + surprise


def test_pace__stops_where_tokens_are_rejected() -> None:
    pace = DraftPace()
    run(pace, acceptance=0.0, extra=0.02)
    before = pace.num_drafted
    run(pace, acceptance=0.0, extra=0.02)
    assert pace.num_drafted - before <= 20
    assert pace.choose(8) == 0


def test_pace__drafts_fewer_tokens_where_each_costs_more() -> None:
    cheap, dear = DraftPace(), DraftPace()
    run(cheap, acceptance=0.8, extra=0.002)
    run(dear, acceptance=0.8, extra=0.03)
    assert cheap.choose(8) > dear.choose(8)


def test_pace__keeps_to_what_is_available() -> None:
    pace = DraftPace()
    run(pace, acceptance=1.0, extra=0.0)
    assert [pace.choose(n) for n in (3, 0, 100)] == [3, 0, LONGEST]
