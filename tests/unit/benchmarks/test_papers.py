"""How the papers' benchmark folds routing and forecasts to other numbers of experts."""

import numpy as np

from benchmarks.papers.paper_context import ExpertFold, count_generated
from benchmarks.papers.run import PAPERS
from train.evaluate.forecasts import RecordedForecast, RoutedStep

FOLD = ExpertFold(6, 3, 2)
"""Experts 0 and 1 become 0, 2 and 3 become 1, 4 and 5 become 2."""


def test_fold__keeps_a_tokens_first_distinct_groups() -> None:
    chosen = np.array([[0, 1, 5], [4, 2, 0], [3, 2, 3]])
    # The last token's choices are all of one group, which then stands twice.
    assert FOLD.fold_experts(chosen).tolist() == [[0, 2], [2, 1], [1, 1]]
    step = RoutedStep(np.zeros(3, np.int64), np.zeros(3, np.int64), chosen[None])
    assert FOLD.fold_step(step).experts(0).tolist() == [[0, 2], [2, 1], [1, 1]]


def test_fold__a_group_is_as_likely_as_any_of_its_experts() -> None:
    scores = np.array([[0.5, 0.5, 0.0, 0.25, 0.0, 0.0]], np.float32)
    order = np.array([1, 5, 2, 3, 0, 9], np.float32)
    forecast = FOLD.fold_forecast(RecordedForecast(1, scores, [5, 4, 0], order), most=None)
    assert forecast.layer == 1
    assert forecast.scores_TE.tolist() == [[0.75, 0.25, 0.0]]
    assert forecast.wanted == [2, 0]
    assert forecast.priority_E is not None
    assert forecast.priority_E.tolist() == [5, 3, 9]
    assert FOLD.fold_forecast(RecordedForecast(1, scores, [5, 4, 0]), most=1).wanted == [2]


def test_generated__counts_one_token_of_each_request() -> None:
    prompt = RoutedStep(
        np.zeros(4, np.int64), np.array([0, 0, 1, 1]), np.zeros((1, 4, 1), np.int64)
    )
    decode = RoutedStep(np.zeros(2, np.int64), np.array([0, 1]), np.zeros((1, 2, 1), np.int64))
    assert count_generated([prompt, decode, decode]) == 4


def test_claims__cover_the_papers_figures() -> None:
    figures = {paper: [name for name, _ in parts] for paper, parts in PAPERS.items()}
    assert figures == {
        "promoe": ["figure 10", "figure 12", "figure 14"],
        "fmoe": ["figures 9 and 10", "figure 11", "figure 12", "figure 13"],
        "moe-infinity-request": ["tables 2 and 3", "table 4", "table 5"],
        "klotski": ["table 3"],
    }
