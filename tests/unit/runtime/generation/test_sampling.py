"""Logits processors against their formulas; recorded log-probabilities are the model's own."""

import math

import pytest
import torch
from torch import Tensor

from runtime.generation.sampling import (
    FiniteScores,
    LogprobRecorder,
    SamplingParams,
    make_logits_processors,
)

LOGITS = torch.tensor([[0.5, -1.0, 2.0, 0.0, 1.5]])
TOKENS = torch.tensor([[4, 4, 2, 0, 0]])
"""Two tokens of the prompt, then three generated ones."""


def processed(recorder: LogprobRecorder | None = None, **options) -> Tensor:
    sampling = SamplingParams(max_new_tokens=8, **options)
    chosen = make_logits_processors(
        sampling, num_prompt=2, recorder=recorder, device=torch.device("cpu")
    )
    return chosen(TOKENS, LOGITS.clone())[0]


def test_processors__without_options_change_nothing() -> None:
    assert torch.equal(processed(), LOGITS[0])


def test_penalties__count_generated_tokens_only() -> None:
    logits = processed(frequency_penalty=0.5, presence_penalty=1.0)
    counts = {2: 1, 0: 2}
    expected = [
        value - 0.5 * counts.get(token, 0) - 1.0 * (token in counts)
        for token, value in enumerate(LOGITS[0].tolist())
    ]
    assert logits.tolist() == pytest.approx(expected)


def test_repetition_penalty__includes_the_prompt() -> None:
    logits = processed(repetition_penalty=2.0).tolist()
    seen = {4, 2, 0}
    expected = [
        (value / 2 if value > 0 else value * 2) if token in seen else value
        for token, value in enumerate(LOGITS[0].tolist())
    ]
    assert logits == pytest.approx(expected)


def test_logit_bias__is_added() -> None:
    assert processed(logit_bias={1: 100.0, 3: -2.0}).tolist() == pytest.approx(
        [0.5, 99.0, 2.0, -2.0, 1.5]
    )


@pytest.mark.parametrize(("least", "is_kept_out"), [(3, False), (4, True)])
def test_min_tokens__suppress_the_end_of_text(least: int, is_kept_out: bool) -> None:
    logits = processed(min_tokens=least, stop_token_ids=frozenset({2}))
    assert math.isinf(logits[2]) == is_kept_out
    assert logits[1] == LOGITS[0, 1]


@pytest.mark.parametrize(
    ("scores", "best"),
    [
        ([[math.nan] * 4], 0),
        ([[0.0, math.nan, 2.0, 1.0]], 2),
        ([[0.0, math.inf, 2.0, 1.0]], 1),
        ([[-math.inf] * 4], 0),
    ],
)
def test_finite_scores__leave_the_best_where_nothing_can_be_drawn(scores, best) -> None:
    row = FiniteScores()(torch.zeros((1, 1), dtype=torch.long), torch.tensor(scores))
    assert torch.multinomial(row.softmax(-1), 8, replacement=True).unique().tolist() == [best]


def test_finite_scores__change_no_other_row() -> None:
    scores = torch.tensor([[0.5, -math.inf, 2.0]])
    assert FiniteScores()(torch.zeros((1, 1), dtype=torch.long), scores) is scores
